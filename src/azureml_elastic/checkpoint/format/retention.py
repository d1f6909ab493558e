"""Retention: the newest checkpoints of the run's lineage are kept, and some for good."""

from __future__ import annotations

from azureml_elastic.checkpoint.format.manifest import DAMAGED, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.errors import CheckpointDamaged

__all__ = ["for_good", "lineage", "retire"]


def lineage(storage: Storage, newest: Manifest, count: int) -> list[Manifest]:
    """Return a checkpoint and its ancestors, at most ``count``, as far as their manifests can be read."""
    found = [newest]
    while (parent := found[-1].parent) is not None and len(found) < count:
        try:
            found.append(Manifest.read(storage, parent.directory))
        except CheckpointDamaged:
            break
    return found


def retire(storage: Storage, newest: Manifest, keep: int) -> list[str]:
    """Remove old checkpoints and incomplete attempts, the manifest of each first, and return their folders.

    Not removed are ``keep`` checkpoints of the lineage of the newest committed one, those that are kept for good, the
    newest damaged one, for examination, and folders of newer rounds, where another process may be writing.

    Raises:
        OSError: a folder could not be removed.
    """
    kept = {manifest.directory for manifest in lineage(storage, newest, keep)}
    names = [(folder, FolderName.parse(folder)) for folder in storage.folders() if folder not in kept]
    old = [folder for folder, name in names if name is not None and name.round <= newest.round and not name.kept]
    quarantined = [folder for folder in old if DAMAGED in storage.files(folder)]
    removed = [folder for folder in old if folder not in quarantined[-1:]]
    for folder in removed:
        storage.remove(folder, MANIFEST)
    return removed


def for_good(step: int, before: int | None, keep_every: int | None) -> bool:
    """Return whether a checkpoint of this step, after one of step ``before``, is kept for good.

    The first one in each ``keep_every`` steps is.
    """
    return keep_every is not None and step // keep_every > (before or 0) // keep_every
