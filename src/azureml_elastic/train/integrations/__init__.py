"""Integrations of training frameworks, each behind its extra."""
