"""A record of the samples of each step, from which "exactly once" can be proven afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.data.position import LoaderState, Window
from azureml_elastic.train.data.sampling import Cursor

__all__ = ["Audit"]


class Audit:
    """Appends JSON lines to ``samples/round-<round>.rank-<rank>.jsonl``.

    A rank records the samples of a step before it takes part in it, and its completion afterwards. A rank that dies in
    between may have contributed its gradients: the step counts if any other rank has completed it. Each line is
    written by one system call, so it survives the death of the process.

    Args:
        run_dir: folder of the run, ``None`` to record nothing

    Attributes:
        records: whether anything is recorded
    """

    def __init__(self, run_dir: Path | None) -> None:
        self._folder = None if run_dir is None else run_dir / "samples"
        self.records = run_dir is not None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = -1
        self._round = 0

    def enter(self, identity: WorkerIdentity) -> None:
        """Continue with the file of a round."""
        self.close()
        self._round = identity.round
        if self._folder is not None:
            path = self._folder / f"round-{identity.round}.rank-{identity.rank}.jsonl"
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def begin(self, step: int, loader: LoaderState, window: Window) -> None:
        """Record this rank's samples of a step that is about to be trained."""
        if self._descriptor >= 0:
            self._write(step, loader=loader.name, epoch=window.after.epoch, of=window.epoch_size, ids=list(window.ids))

    def ended(self, step: int, loader: LoaderState, cursor: Cursor) -> None:
        """Record the number of samples of an epoch, which was unknown before its end."""
        self._write(step, loader=loader.name, epoch=cursor.epoch, of=cursor.consumed, ids=[])

    def done(self, step: int) -> None:
        """Record that a step is completed."""
        self._write(step, done=True)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, step: int, **fields: Any) -> None:
        if self._descriptor >= 0:
            os.write(self._descriptor, json.dumps({"round": self._round, "step": step, **fields}).encode() + b"\n")
