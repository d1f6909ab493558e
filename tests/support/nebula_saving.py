"""Functions that the ranks of the tests of Nebula's interface run."""

from __future__ import annotations

import torch
import torch.distributed as dist

import azureml_elastic.nebula as nm


def save_together(folder, num_of_files):
    """Save a part on each rank under two tags, the second on rank 0 only; return tags, files and weights."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    nm.init(persistent_storage_path=str(folder))
    for tag in ("global_step1", "global_step2"):
        checkpoint = nm.Checkpoint(tag, num_of_files)
        if (tag, rank) != ("global_step2", 1):
            checkpoint.save(f"part{rank}", {"w": torch.full((4,), float(rank)), "tag": tag})
        if num_of_files == -2 and tag == "global_step1":
            checkpoint.commit()
    nm.wait()
    dist.barrier()
    latest = nm.get_latest_checkpoint()
    assert latest is not None
    values = [latest.load(f"part{each}") for each in range(2)]
    dist.barrier()
    dist.destroy_process_group()
    return [each.tag for each in nm.list_checkpoints()], latest.files, [value["w"].tolist() for value in values]
