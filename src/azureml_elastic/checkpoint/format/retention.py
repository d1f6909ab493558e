"""Retention: the newest checkpoints of the run's lineage are kept, and some for good."""

from __future__ import annotations

from azureml_elastic.checkpoint.format.manifest import COMMITTED, DAMAGED, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.errors import CheckpointDamaged

__all__ = ["for_good", "lineage", "retire"]


def lineage(storage: Storage, newest: Manifest) -> list[Manifest]:
    """Return a checkpoint and its ancestors, as far as their manifests can be read."""
    found = [newest]
    while (parent := found[-1].parent) is not None:
        try:
            found.append(Manifest.read(storage, parent.directory))
        except CheckpointDamaged:
            break
    return found


def retire(storage: Storage, newest: Manifest, keep: int, *, all_runs: bool = False) -> list[str]:
    """Remove old checkpoints and incomplete attempts, the manifest of each first, and return their folders.

    Not removed are ``keep`` checkpoints of the lineage of the newest committed one, those that are kept for good, the
    newest damaged one, for examination, folders of newer rounds, where another process may be writing, and whole
    committed checkpoints that do not belong to the lineage: this run has neither written nor restored them.

    Args:
        storage: storage of the checkpoints.
        newest: newest committed checkpoint.
        keep: number of checkpoints to keep.
        all_runs: whether to remove committed checkpoints outside of the lineage, too.

    Raises:
        OSError: a folder could not be removed.
    """
    line = [manifest.directory for manifest in lineage(storage, newest)]
    kept, own = set(line[:keep]), set(line[keep:])
    names = [(folder, FolderName.parse(folder)) for folder in storage.folders() if folder not in kept]
    old = [folder for folder, name in names if name is not None and name.round <= newest.round and not name.kept]
    files = {folder: storage.files(folder) for folder in old}
    quarantined = [folder for folder in old if DAMAGED in files[folder]]
    foreign = {folder for folder in old if COMMITTED in files[folder] and DAMAGED not in files[folder]} - own
    spared = {*quarantined[-1:], *(() if all_runs else foreign)}
    removed = [folder for folder in old if folder not in spared]
    for folder in removed:
        storage.remove(folder, MANIFEST)
    return removed


def for_good(step: int, before: int | None, keep_every_steps: int | None) -> bool:
    """Return whether a checkpoint of this step, after one of step ``before``, is kept for good.

    The first one in each ``keep_every_steps`` steps is.
    """
    return keep_every_steps is not None and step // keep_every_steps > (before or 0) // keep_every_steps
