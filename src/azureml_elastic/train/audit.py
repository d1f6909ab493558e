"""Which samples each step has trained, written down so that "exactly once" can be proven afterwards."""

from __future__ import annotations

import json
import os
from pathlib import Path

from azureml_elastic.train.agent import Identity
from azureml_elastic.train.loader import Window

__all__ = ["Audit"]


class Audit:
    """Appends one JSON line a step to ``samples/round-<round>.rank-<rank>.jsonl``.

    A line is handed to the kernel before ``run.step()`` returns, so it survives the death of the process.

    Args:
        run_dir: the run's folder, ``None`` for the working directory.
        identity: of this process.
    """

    def __init__(self, run_dir: str | None, identity: Identity) -> None:
        folder = Path(run_dir or ".") / "samples"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"round-{identity.round}.rank-{identity.rank}.jsonl"
        self._round = identity.round
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, step: int, window: Window) -> None:
        """Write down what a step has trained.

        Args:
            step: steps completed with it.
            window: of this rank; a stand-in counts for nothing.
        """
        ids = list(window.ids[: window.own])
        line = json.dumps({"round": self._round, "step": step, "epoch": window.after.epoch, "ids": ids})
        os.write(self._descriptor, line.encode() + b"\n")

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
