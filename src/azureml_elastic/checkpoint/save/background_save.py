"""The part of a save that runs beside training, on a thread of each rank: files, manifest, commit.

Its order leaves the last committed checkpoint intact at any time:

1. every rank writes its file durably, with a checksum;
2. rank 0 writes the manifest, which names all files with their checksums, once all ranks have written theirs;
3. rank 0 commits through the agent: one compare-and-swap, refused when a newer round has taken over;
4. only then, and when training has the outcome, are older checkpoints removed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from typing_extensions import override

from azureml_elastic.checkpoint.save.background_task import BackgroundTask, TaskOutcome
from azureml_elastic.checkpoint.save.commit import commit, discard, remove_older
from azureml_elastic.checkpoint.storage.storage import FileSum, Storage
from azureml_elastic.plurals import counted

__all__ = ["SaveTask"]


@dataclass(eq=False)
class SaveTask(BackgroundTask):
    """One save in progress.

    Args:
        storage: storage of the checkpoints.
        keep: number of committed checkpoints to keep.
        stall_seconds: time that training waited for the copy.
        pauses: seconds between attempts to commit while the table is unavailable.
    """

    storage: Storage
    keep: int
    stall_seconds: float
    pauses: tuple[float, ...]

    @override
    def work(self) -> TaskOutcome:
        sums = self._write()
        parts = self.collective(lambda: self.control.gather((self.error, sums)))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(parts) if error is not None]
        self.manifest = replace(self.manifest, files={name: each for _, part in parts for name, each in part.items()})
        outcome: TaskOutcome | None = None
        if self.control.rank == 0:
            try:
                outcome = self._finish(failed)
            except Exception as error:  # noqa: BLE001 - the other ranks wait for the outcome
                outcome = TaskOutcome("failed", f"rank 0: {type(error).__name__}: {error}")
        return self.collective(lambda: self.control.from_main(outcome))

    @override
    def tidy_up(self, outcome: TaskOutcome) -> None:
        if self.control.rank == 0 and outcome.kind == "committed":
            remove_older(self.storage, self.manifest, self.keep)

    def _write(self) -> dict[str, FileSum]:
        folder = self.manifest.directory
        try:
            if self.copy is not None and not self.copy.empty:
                self.storage.make(folder)
                return {self.file: self.storage.write(folder, self.file, [self.copy.buffer.view(0, self.copy.nbytes)])}
        except Exception as error:  # noqa: BLE001 - the other ranks wait for this one
            self.error = f"{type(error).__name__}: {error}"
        return {}

    def _finish(self, failed: list[str]) -> TaskOutcome:
        if failed:
            reason = f"writing failed on {counted(len(failed), 'rank')}: {'; '.join(failed)}"
            return discard(self.storage, self.manifest.directory, reason)
        return commit(
            self.storage,
            self.agent,
            self.manifest,
            stall_seconds=self.stall_seconds,
            pauses=self.pauses,
            abandoned=lambda: self.abandoned,
        )
