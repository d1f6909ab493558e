"""``Trainer.fit`` of Lightning: exact data, state in memory, and notices, without a changed line.

Tested with ``lightning`` and ``pytorch_lightning`` 2.6.
"""
