"""Loops with ``accelerate.Accelerator``: exact data, state in memory, and notices, without a changed line.

Tested with accelerate 1.15.
"""
