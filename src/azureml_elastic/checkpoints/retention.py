"""Which checkpoints stay: the newest ones of the line that the run is on, and some for good."""

from __future__ import annotations

from azureml_elastic.checkpoints.manifest import MANIFEST, FolderName, Manifest
from azureml_elastic.checkpoints.storage import Storage
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

    Folders that are kept for good stay, by their names; so do those of newer rounds: another process may be writing
    there.

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
    removed = []
    for folder in storage.folders():
        name = FolderName.parse(folder)
        if name is not None and name.round <= newest.round and not name.kept and folder not in kept:
            storage.remove(folder, MANIFEST)
            removed.append(folder)
    return removed


def for_good(step: int, before: int | None, keep_every: int | None) -> bool:
    """Tell whether a checkpoint is kept for good: the first one in each ``keep_every`` steps is.

    Args:
        step: of it.
        before: the step of the checkpoint before it, ``None`` where it is the first.
        keep_every: steps; ``None`` keeps none for good.
    """
    return keep_every is not None and step // keep_every > (before or 0) // keep_every
