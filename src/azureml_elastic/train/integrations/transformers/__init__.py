"""``transformers.Trainer`` and its subclasses: exact data, state in memory, and notices, without a changed line.

Tested with transformers 4.57 and 5.23.
"""
