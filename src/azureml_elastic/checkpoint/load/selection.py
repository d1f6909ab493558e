"""Selection of the checkpoint to restore: the newest undamaged one, the same on all ranks.

Candidates are the committed checkpoint and its ancestors. A candidate needs a manifest of the committed digest, and
files of the manifest's checksums; each rank verifies a part of them. One bad file on one rank sends all ranks to the
manifest's parent. Where the manifest itself is damaged or gone, and with it the link to its parent, the newest folder
with a commit marker is the next candidate: also one that is newer, since the pointer is then out of date. A checkpoint
that an agent made, when it ended, of a state that it held in memory is adopted before.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from azureml_elastic.checkpoint.format.catalogue import handed_over, survey, verify
from azureml_elastic.checkpoint.format.manifest import COMMITTED, DAMAGED, Manifest
from azureml_elastic.checkpoint.save.background_save import commit_before_restore
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.errors import CheckpointDamaged
from azureml_elastic.ipc.agent_interface import Agent
from azureml_elastic.ipc.worker_messages import Damaged

_LOG = logging.getLogger(__name__)

_THREADS = 4

STALE_SECONDS = 5.0
"""Time limit for a mount to show the files of a committed manifest: its caches may be stale."""

_POLL_SECONDS = 0.25

_LONGEST_TEXT = 2000
"""Characters of a report of what is damaged."""


@dataclass(frozen=True)
class EarlierCheckpoint:
    """The committed checkpoint of another run, and its storage, which a run restores that has none of its own."""

    storage: Storage
    reference: Reference


@dataclass
class CheckpointSelector:
    """Search for an undamaged checkpoint.

    Args:
        stale_seconds: time limit for a mount to show what was written, once for each search.
        marks: whether markers are added to the folders: those of another run are left as they are.
        agent: agent to which rank 0 reports damaged checkpoints, if any.
    """

    storage: Storage
    control: ControlGroup
    stale_seconds: float = STALE_SECONDS
    marks: bool = True
    agent: Agent | None = None

    def __post_init__(self) -> None:
        self._until = time.monotonic() + self.stale_seconds

    def newest_whole(self, pointer: Reference) -> Manifest:
        """Return the manifest of the newest undamaged checkpoint, from the committed one on. A collective.

        Raises:
            CheckpointDamaged: all are damaged; raised on all ranks.
        """
        # Rank 0 alone looks for them: mounts of other nodes may show other folders.
        candidates = self._candidates(pointer) if self.control.rank == 0 else iter(())
        damages: list[str] = []
        while True:
            directory, manifest, damage = self.control.from_main(next(candidates, ("", None, "")))
            if not directory:
                raise CheckpointDamaged(
                    f"The run's newest checkpoint is {pointer.directory} in {self.storage}, but neither it nor an "
                    f"older one is whole: {'; '.join(damages)}. Check that this is the folder that the run has "
                    "written to. To start anew, submit with another checkpoint folder and run id."
                )
            problems = [damage]
            if manifest is not None:
                parts = self.control.together("Checking files", functools.partial(self._check, manifest))
                problems = [problem for part in parts for problem in part]
            if not problems:
                assert manifest is not None
                self._mark(directory, COMMITTED, b"")  # missing where the writer died before
                return manifest
            damages.extend(problems)
            text = "; ".join(problems)
            if self.control.rank == 0:
                _LOG.warning("The checkpoint %s is damaged, an older one is restored: %s", directory, text)
                if self.agent is not None:
                    self.agent.report(Damaged(directory, text[:_LONGEST_TEXT]))
            self._mark(directory, DAMAGED, text.encode() + b"\n")

    def _candidates(self, pointer: Reference) -> Iterator[tuple[str, Manifest | None, str]]:
        """Yield folder, manifest and damage of each candidate, the newest first. For rank 0.

        After a damaged manifest, whose parent is unknown, every committed checkpoint is a candidate.
        """
        tried: set[str] = set()
        reference: Reference | None = pointer
        while reference is not None:
            tried.add(reference.directory)
            try:
                manifest = self._read(reference)
                if manifest.digest != reference.digest:
                    raise CheckpointDamaged(f"{reference.directory} has another digest than was committed")  # noqa: TRY301
            except CheckpointDamaged as error:
                yield reference.directory, None, str(error)
                break
            yield reference.directory, manifest, ""
            reference = manifest.parent
        else:
            return  # all of the run's are damaged; any other checkpoint there is another run's
        found = [each.manifest for each in survey(self.storage) if each.committed and each.manifest is not None]
        for manifest in sorted(found, key=lambda each: (each.round, each.step, each.directory), reverse=True):
            if manifest.directory not in tried:
                yield manifest.directory, manifest, ""

    def _mark(self, directory: str, marker: str, content: bytes) -> None:
        """Add a marker file to a folder that has none yet. Damaged checkpoints are kept for examination."""
        if self.marks and self.control.rank == 0 and self.storage.size(directory, marker) is None:
            with contextlib.suppress(OSError):
                self.storage.write(directory, marker, [content])

    def _read(self, reference: Reference) -> Manifest:
        while True:
            try:
                return Manifest.read(self.storage, reference.directory)
            except CheckpointDamaged:
                if time.monotonic() >= self._until:
                    raise
            time.sleep(_POLL_SECONDS)

    def _check(self, manifest: Manifest) -> list[str]:
        """Return the problems of this rank's part of the files: every world_size-th in order of size."""
        # Dealt out by size, so that all ranks read about as much.
        ordered = sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0]))

        def problem(item: tuple[str, FileSum]) -> str | None:
            name, sums = item
            # A stale cache may miss a file or its end; a wrong checksum is final.
            while self.storage.size(manifest.directory, name) != sums.size and time.monotonic() < self._until:
                time.sleep(_POLL_SECONDS)
            return self.storage.problem(manifest.directory, name, sums)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="verify-checkpoint") as pool:
            found = pool.map(problem, ordered[self.control.rank :: self.control.world_size])
            return [each for each in found if each is not None]


def adopt_handed_over(
    storage: Storage, control: ControlGroup, agent: Agent, committed: Reference | None
) -> Reference | None:
    """Commit the whole handed-over checkpoint of the highest step, if it is beyond the committed one. A collective.

    It was written without the table, which may have been away; what commits it now is fenced like any other commit.

    Returns:
        The reference to it, ``None`` where there is none.

    Raises:
        CheckpointError: it could not be committed.
        Fenced: a newer round has taken over.
    """
    manifest: Manifest | None = None
    if control.rank == 0:
        after = -1 if committed is None else committed.step
        try:
            # Before the commit: a damaged one would hide the committed checkpoint that is not its parent.
            manifest = next((each for each in handed_over(storage, after) if not verify(storage, each)), None)
        except OSError as error:
            _LOG.warning("No state of an agent that has ended is looked for in %s: %s", storage, error)
    return commit_before_restore(storage, control, agent, manifest)
