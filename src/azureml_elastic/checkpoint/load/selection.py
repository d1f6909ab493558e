"""Which checkpoint to start from: the newest that is whole, the same on all ranks.

From the committed pointer backwards: a manifest whose digest is the committed one, then the checksums of all its
files, each rank reading its part of them. One bad file on one rank sends all ranks back to the manifest's parent.
Where the manifest itself is damaged, and with it the link to its parent, the newest earlier folder counts that its
writer has marked as committed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from azureml_elastic.checkpoint.format.manifest import COMMITTED, DAMAGED, Manifest, Reference
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged

__all__ = ["STALE_SECONDS", "CheckpointSelector"]

_LOG = logging.getLogger(__name__)

_THREADS = 4

STALE_SECONDS = 5.0
"""How long a mount has to show what the committed manifest promises: its caches may be behind."""

_LOOK_SECONDS = 0.25


class CheckpointSelector:
    """Looks for a whole checkpoint.

    Args:
        storage: of the checkpoints.
        control: the ranks' agreement.
        patience: seconds for a mount to show what was written, once for each search.
        report: is told on rank 0 which checkpoint is damaged, and how.
    """

    def __init__(
        self,
        storage: Storage,
        control: ControlGroup,
        patience: float = STALE_SECONDS,
        report: Callable[[str, str], None] = lambda _, __: None,
    ) -> None:
        self._storage = storage
        self._control = control
        self._is_main = control.rank == 0
        self._report = report
        self._until = time.monotonic() + patience

    def newest_whole(self, pointer: Reference) -> Manifest:
        """Return the manifest of the first whole checkpoint from the pointer backwards. A collective.

        Raises:
            CheckpointDamaged: none is whole; raised on all ranks.
        """
        candidates = self._candidates(pointer) if self._is_main else iter(())
        damages: list[str] = []
        while True:
            directory, manifest, damage = self._control.from_main(next(candidates, ("", None, "")))
            if not directory:
                raise CheckpointDamaged(
                    f"The run's newest checkpoint is {pointer.directory} in {self._storage}, but neither it nor an "
                    f"older one is whole: {'; '.join(damages)}. Check that this is the folder that the run has "
                    "written to. To start anew, submit with another checkpoint folder and run id."
                )
            problems = [damage]
            if manifest is not None:
                parts = self._control.together("Checking files", self._checker(manifest))
                problems = [problem for part in parts for problem in part]
                if not problems:
                    if self._is_main:
                        self._accept(manifest)
                    return manifest
            damages.extend(problems)
            if self._is_main:
                self._quarantine(directory, "; ".join(problems))

    def _candidates(self, pointer: Reference) -> Iterator[tuple[str, Manifest | None, str]]:
        """Yield folders with their manifests from the pointer backwards, or what is wrong with one. For rank 0.

        With a manifest the link to its parent is lost, and with it the line. Then every other checkpoint counts that
        was committed earlier, whichever line it is on: the one with the most steps first.
        """
        tried: set[str] = set()
        reference: Reference | None = pointer
        while reference is not None:
            tried.add(reference.directory)
            try:
                manifest = self._patiently(reference)
                if manifest.digest != reference.digest:
                    raise CheckpointDamaged(f"{reference.directory} has another digest than was committed")  # noqa: TRY301
            except CheckpointDamaged as error:
                yield reference.directory, None, str(error)
                break
            yield reference.directory, manifest, ""
            reference = manifest.parent
        else:
            return
        for manifest in self._committed_before(pointer):
            if manifest.directory not in tried:
                yield manifest.directory, manifest, ""

    def _accept(self, manifest: Manifest) -> None:
        """Make up for a mark that its writer did not live to make."""
        if self._storage.size(manifest.directory, COMMITTED) is None:
            with contextlib.suppress(OSError):
                self._storage.write(manifest.directory, COMMITTED, [])

    def _quarantine(self, directory: str, problems: str) -> None:
        """Report a damaged checkpoint and mark its folder, which stays to be examined."""
        _LOG.warning("The checkpoint %s is damaged, an older one is used: %s", directory, problems)
        self._report(directory, problems)
        if self._storage.size(directory, DAMAGED) is None:
            with contextlib.suppress(OSError):
                self._storage.write(directory, DAMAGED, [problems.encode() + b"\n"])

    def _patiently(self, reference: Reference) -> Manifest:
        while True:
            try:
                return Manifest.read(self._storage, reference.directory)
            except CheckpointDamaged:
                if time.monotonic() >= self._until:
                    raise
            time.sleep(_LOOK_SECONDS)

    def _committed_before(self, reference: Reference) -> list[Manifest]:
        """Return the manifests that can be read of the checkpoints that were committed earlier, the newest first."""
        found = []
        for folder in self._storage.folders():
            if COMMITTED in self._storage.files(folder):
                with contextlib.suppress(CheckpointDamaged):
                    found.append(Manifest.read(self._storage, folder))
        earlier = (each for each in found if (each.step, each.directory) < (reference.step, reference.directory))
        return sorted(earlier, key=lambda each: (each.step, each.directory), reverse=True)

    def _checker(self, manifest: Manifest) -> Callable[[], list[str]]:
        """Return a function that checks this rank's part of the files: every world_size-th by size."""
        ordered: list[tuple[str, FileSum]] = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))
        mine = ordered[self._control.rank :: self._control.world_size]

        def problem(item: tuple[str, FileSum]) -> str | None:
            name, sums = item
            # What is missing or too short may be on its way; what has another checksum is not.
            while self._storage.size(manifest.directory, name) != sums.size and time.monotonic() < self._until:
                time.sleep(_LOOK_SECONDS)
            return self._storage.problem(manifest.directory, name, sums)

        def check() -> list[str]:
            with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify-checkpoint") as pool:
                return [each for each in pool.map(problem, mine) if each is not None]

        return check
