"""Which checkpoints stay: the newest ones of the line that the run is on, and some for good."""

from __future__ import annotations

from azureml_elastic.checkpoint.format.manifest import DAMAGED, MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoint.storage.storage import Storage
from azureml_elastic.errors import CheckpointDamaged

__all__ = ["for_good", "lineage", "retire"]


def lineage(storage: Storage, newest: Manifest, count: int) -> list[Manifest]:
    """Return a checkpoint and the ones before it, each the parent of the one before, as far as they are there.

    Args:
        storage: of the checkpoints.
        newest: the first of them.
        count: the most to look for.
    """
    found = [newest]
    while (parent := found[-1].parent) is not None and len(found) < count:
        try:
            found.append(Manifest.read(storage, parent.directory))
        except CheckpointDamaged:
            break
    return found


def retire(storage: Storage, newest: Manifest, keep: int) -> list[str]:
    """Remove old checkpoints and what attempts to write one have left, the manifest of each first.

    Folders that are kept for good stay, by their names; so do those of newer rounds, where another process may be
    writing, and the newest one that was found damaged, for whoever wants to know why.

    Args:
        storage: of the checkpoints.
        newest: the one committed last.
        keep: how many of its line stay.

    Returns:
        The names of the folders that were removed.

    Raises:
        OSError: a folder could not be removed.
    """
    kept = {manifest.directory for manifest in lineage(storage, newest, keep)}
    old = []
    for folder in storage.folders():
        name = FolderName.parse(folder)
        if name is not None and name.round <= newest.round and not name.kept and folder not in kept:
            old.append(folder)
    quarantined = [folder for folder in old if DAMAGED in storage.files(folder)]
    removed = [folder for folder in old if folder not in quarantined[-1:]]
    for folder in removed:
        storage.remove(folder, MANIFEST)
    return removed


def for_good(step: int, before: int | None, keep_every: int | None) -> bool:
    """Tell whether a checkpoint is kept for good: the first one in each ``keep_every`` steps is.

    Args:
        step: of it.
        before: the step of the checkpoint before it, ``None`` where it is the first.
        keep_every: steps; ``None`` keeps none for good.
    """
    return keep_every is not None and step // keep_every > (before or 0) // keep_every
