"""A script without a session that ends with a code, before it connects or after: ``ending.py CODE [connected]``."""

from __future__ import annotations

import sys

import torch.distributed as dist

if "connected" in sys.argv:
    dist.init_process_group("gloo")
    dist.barrier()
sys.exit(int(sys.argv[1]))
