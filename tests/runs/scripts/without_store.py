"""A program that installs a package with which torch serves no store."""

import broken_store  # noqa: F401
import torch.distributed as dist

dist.init_process_group("gloo")
