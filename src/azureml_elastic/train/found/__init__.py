"""State that a script keeps beside its model and optimizer, found instead of declared."""
