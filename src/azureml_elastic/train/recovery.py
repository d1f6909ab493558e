"""Which checkpoint to start from: the newest that is whole, the same on all ranks.

From the committed pointer backwards: a manifest whose digest is the committed one, then the checksums of all its
files, each rank reading its part of them. One bad file on one rank sends all ranks back to the manifest's parent.
Where the manifest itself is damaged, and with it the link to its parent, the newest earlier folder counts that its
writer has marked as committed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from azureml_elastic.errors import CheckpointDamaged
from azureml_elastic.train.agent import Identity
from azureml_elastic.train.control import Control
from azureml_elastic.train.manifest import FileSum, Manifest, Reference, verify_file

__all__ = ["COMMITTED", "Recovery"]

_LOG = logging.getLogger(__name__)

COMMITTED = "committed"
"""The empty file that marks a checkpoint's folder once it has been committed."""


class Recovery:
    """Looks for a whole checkpoint.

    Args:
        folder: of the checkpoints.
        identity: of this process.
        control: the ranks' agreement.
    """

    def __init__(self, folder: Path, identity: Identity, control: Control) -> None:
        self._folder = folder
        self._identity = identity
        self._control = control
        self._is_main = identity.rank == 0

    def newest_whole(self, pointer: Reference) -> Manifest:
        """Return the manifest of the first whole checkpoint from the pointer backwards. A collective.

        Raises:
            CheckpointDamaged: none is whole; raised on all ranks.
        """
        candidates = self._candidates(pointer) if self._is_main else iter(())
        damages: list[str] = []
        while True:
            manifest, damage = self._control.from_main(next(candidates, (None, "")))
            if manifest is not None:
                problems = [
                    problem
                    for part in self._control.together("Checking files", self._checker(manifest))
                    for problem in part
                ]
                if not problems:
                    if damages and self._is_main:
                        _LOG.warning("Falling back to the checkpoint %s: %s", manifest.directory, "; ".join(damages))
                    return manifest
                damages.extend(problems)
            elif damage:
                damages.append(damage)
            else:
                raise CheckpointDamaged(
                    f"The run's newest checkpoint is {pointer.directory} in {self._folder}, but neither it nor an "
                    f"older one is whole: {'; '.join(damages)}. Check that this is the folder that the run has "
                    "written to. To start anew, submit with another checkpoint folder and run id."
                )

    def _candidates(self, pointer: Reference) -> Iterator[tuple[Manifest | None, str]]:
        """Yield manifests from the pointer backwards, or what is wrong with one. For rank 0."""
        reference: Reference | None = pointer
        while reference is not None:
            try:
                manifest = Manifest.read(self._folder, reference.directory)
                if manifest.digest != reference.digest:
                    raise CheckpointDamaged(f"{reference.directory} has another digest than was committed")  # noqa: TRY301
            except CheckpointDamaged as error:
                yield None, str(error)
                reference = self._committed_before(reference)  # the link to the parent is lost with the manifest
            else:
                yield manifest, ""
                reference = manifest.parent

    def _committed_before(self, reference: Reference) -> Reference | None:
        found = []
        for marker in self._folder.glob(f"*/{COMMITTED}"):
            try:
                manifest = Manifest.read(self._folder, marker.parent.name)
            except CheckpointDamaged:
                continue
            if (manifest.step, manifest.directory) < (reference.step, reference.directory):
                found.append(manifest.reference)
        return max(found, key=lambda entry: (entry.step, entry.directory), default=None)

    def _checker(self, manifest: Manifest) -> Callable[[], list[str]]:
        """Return a function that checks this rank's part of the files: every world_size-th by size."""
        ordered: list[tuple[str, FileSum]] = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))
        mine = ordered[self._identity.rank :: self._identity.world_size]
        folder = self._folder / manifest.directory

        def check() -> list[str]:
            return [problem for name, sums in mine if (problem := verify_file(folder / name, sums)) is not None]

        return check
