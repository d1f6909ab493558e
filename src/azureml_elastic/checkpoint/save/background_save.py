"""The part of a save that runs beside training, on a thread of each rank: files, manifest, commit.

Its order leaves the last committed checkpoint intact at any time:

1. every rank writes its file durably, with a checksum;
2. rank 0 writes the manifest, which names all files with their checksums, once all ranks have written theirs;
3. rank 0 asks the agent to commit: one compare-and-swap, refused when a newer round has taken over;
4. only then are older checkpoints removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from azureml_elastic.checkpoint.format.manifest import Manifest
from azureml_elastic.checkpoint.save.commit import commit, discard
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.distributed.background_task import BackgroundTask, TaskOutcome
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.ipc.agent_interface import Agent

__all__ = ["SaveTask"]


class SaveTask(BackgroundTask):
    """One save in progress.

    Args:
        storage: storage of the checkpoints.
        manifest: manifest without the files.
        name: name of this rank's file.
        blocks: content of the file, ``None`` where this rank writes nothing.
        error: why this rank cannot write, ``None`` where it can.
        control: control group of this thread.
        agent: agent that commits.
        stall_seconds: time that training waited for the copy.
        keep: number of committed checkpoints to keep.
        pauses: seconds between attempts to commit while the table is unavailable.
    """

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        name: str,
        blocks: Iterable[bytes | memoryview] | None,
        error: str | None,
        *,
        control: ControlGroup,
        agent: Agent,
        stall_seconds: float,
        keep: int,
        pauses: tuple[float, ...],
    ) -> None:
        super().__init__()
        self.manifest = manifest
        self._storage = storage
        self._name = name
        self._blocks = blocks
        self._error = error
        self._control = control
        self._agent = agent
        self._stall = stall_seconds
        self._keep = keep
        self._pauses = pauses

    def work(self) -> TaskOutcome:
        """Write this rank's file, and commit on rank 0."""
        sums = self._write()
        parts = self.collective(lambda: self._control.gather((self._error, sums)))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(parts) if error is not None]
        files = {name: each for _, part in parts for name, each in part.items()}
        self.manifest = replace(self.manifest, files=files)
        outcome: TaskOutcome | None = None
        if self._control.rank == 0:
            try:
                outcome = self._finish(failed)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
                outcome = TaskOutcome("failed", f"rank 0: {type(error).__name__}: {error}")
        return self.collective(lambda: self._control.from_main(outcome))

    def _write(self) -> dict[str, FileSum]:
        try:
            if self._error is None and self._blocks is not None:
                self._storage.make(self.manifest.directory)
                return {self._name: self._storage.write(self.manifest.directory, self._name, self._blocks)}
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            self._error = f"{type(error).__name__}: {error}"
        finally:
            self._blocks = None
        return {}

    def _finish(self, failed: list[str]) -> TaskOutcome:
        if failed:
            return discard(self._storage, self.manifest, f"writing failed on {len(failed)} ranks: {'; '.join(failed)}")
        return commit(
            self._storage,
            self._agent,
            self.manifest,
            keep=self._keep,
            stall_seconds=self._stall,
            pauses=self._pauses,
            abandoned=lambda: self.abandoned,
        )
