"""DeepSpeed's own calls: exact data, checkpoints for any number of ranks, state in memory, and notices.

No line of a script changes. Tested with DeepSpeed 0.19.8 on CPUs.
"""
