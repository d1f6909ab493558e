"""Rounds and members as data, decisions about them, and their rows in the table."""
