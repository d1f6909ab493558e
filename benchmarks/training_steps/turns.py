"""Jobs that train in turn, so that a change of the machine's load meets both of them.

Each job trains a block of steps while the other one waits, and notes for each block its wall time and the CPU time of
each process until its next block begins, which includes what a process does in the background.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

__all__ = ["BLOCKS", "STEPS_OF_A_BLOCK", "TOTAL_STEPS", "WARM_UP", "Turns"]

WARM_UP = 8
"""Steps before the first block."""

BLOCKS = int(os.environ.get("BENCH_BLOCKS", "12"))
STEPS_OF_A_BLOCK = int(os.environ.get("BENCH_BLOCK", "5"))
TOTAL_STEPS = WARM_UP + BLOCKS * STEPS_OF_A_BLOCK + 1

_POLL_SECONDS = 0.02


class Turns:
    """The turns of one process; it calls :meth:`step` at the beginning of each step."""

    def __init__(self) -> None:
        self._folder = Path(os.environ["BENCH_FOLDER"])
        self._side = int(os.environ["BENCH_SIDE"])
        self._rank, self._world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._steps = 0
        self._begun = (0.0, 0.0)
        self._blocks: list[tuple[float, float]] = []
        self._wall: float | None = None

    def step(self) -> None:
        block, rest = divmod(self._steps - WARM_UP, STEPS_OF_A_BLOCK)
        self._steps += 1
        if block < 0 or rest:
            return
        if block:
            self._wall = time.perf_counter() - self._begun[0]
            (self._folder / f"done.{self._side}.{self._rank}.{block}").touch()
        if block < BLOCKS:
            # The first side begins each block, the second one follows.
            self._wait(1 - self._side, block if self._side == 0 else block + 1)
        if self._wall is not None:
            self._blocks.append((self._wall, time.process_time() - self._begun[1]))
            self._wall = None
        if block == BLOCKS:
            target = self._folder / f"blocks.{self._side}.{self._rank}.json"
            target.write_text(json.dumps(self._blocks), "ascii")
        self._begun = (time.perf_counter(), time.process_time())

    def _wait(self, side: int, block: int) -> None:
        if block:
            awaited = [self._folder / f"done.{side}.{rank}.{block}" for rank in range(self._world)]
            while not all(each.exists() for each in awaited):
                time.sleep(_POLL_SECONDS)
