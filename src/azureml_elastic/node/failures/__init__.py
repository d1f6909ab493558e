"""Failures of workers and hosts: classification, restart policy, fault attribution and messages."""
