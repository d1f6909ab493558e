"""Which samples each step has trained, written down so that "exactly once" can be proven afterwards."""

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

    A rank says what a step will train before it takes part in it, and that the step is completed afterwards. A rank
    that dies in between may have given its share of the gradients: the step counts if any other rank has completed it.
    Lines are handed to the kernel at once, so they survive the death of the process.

    Args:
        run_dir: the run's folder, ``None`` for the working directory.
    """

    def __init__(self, run_dir: str | None) -> None:
        self._folder = Path(run_dir or ".") / "samples"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._descriptor = -1
        self._round = 0

    def enter(self, identity: WorkerIdentity) -> None:
        """Write to the file of this round from now on."""
        self.close()
        self._round = identity.round
        path = self._folder / f"round-{identity.round}.rank-{identity.rank}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def begin(self, step: int, stream: LoaderState, window: Window) -> None:
        """Write down what a step is about to train.

        Args:
            step: steps completed with it.
            stream: whose data they are.
            window: window of this rank.
        """
        what = {"epoch": window.after.epoch, "of": window.epoch_size, "ids": list(window.ids)}
        self._write({"round": self._round, "step": step, "loader": stream.name, **what})

    def ended(self, step: int, stream: LoaderState, cursor: Cursor) -> None:
        """Write down how many samples an epoch has turned out to have.

        Args:
            step: steps completed.
            stream: whose data they are.
            cursor: cursor at the end.
        """
        what = {"epoch": cursor.epoch, "of": cursor.consumed, "ids": []}
        self._write({"round": self._round, "step": step, "loader": stream.name, **what})

    def done(self, step: int) -> None:
        """Write down that a step is completed."""
        self._write({"round": self._round, "step": step, "done": True})

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _write(self, line: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(line).encode() + b"\n")
