"""Plain torchrun with our rendezvous, through the entry point of the installed package."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support import waiting
from tests.support.paths import PROGRAMS

PROGRAM = str(PROGRAMS / "stepping.py")


class Torchrun:
    """One torchrun process tree; its workers' output goes to a file."""

    def __init__(self, folder: Path, name: str, endpoint: str, nodes: str, steps: int, restarts: int) -> None:
        self.log = folder / f"{name}.log"
        self._stream = self.log.open("wb")
        command = [
            sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=azure-table", f"--rdzv-endpoint={endpoint}",
            "--rdzv-id=run", f"--nnodes={nodes}", "--nproc-per-node=1", "--monitor-interval=0.1",
            f"--max-restarts={restarts}", "--rdzv-conf=rescale_debounce=0.1,table_heartbeat_interval=1",
            PROGRAM, str(steps), str(folder / "progress"), str(folder / "go"),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=self._stream, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    def worlds(self) -> list[int]:
        return [int(size) for size in re.findall(r"world (\d+)", self.log.read_text(errors="replace"))]

    def kill(self) -> None:
        import psutil

        family = [self.process.pid, *(child.pid for child in psutil.Process(self.process.pid).children(recursive=True))]
        for pid in family:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(300)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._stream.close()


@pytest.fixture
def start(tmp_path):
    made: list[Torchrun] = []

    def make(name: str, nodes: str = "1:3", steps: int = 20, restarts: int = 3) -> Torchrun:
        made.append(Torchrun(tmp_path, name, str(tmp_path / "table.sqlite"), nodes, steps, restarts))
        return made[-1]

    yield make
    for torchrun in made:
        torchrun.close()


until = partial(waiting.until, timeout=90)


def test_a_run_grows_loses_a_node_and_ends_well(start, tmp_path):
    first, second = start("first"), start("second")
    until(lambda: first.worlds()[-1:] == [2] and second.worlds()[-1:] == [2])
    third = start("third")
    until(lambda: third.worlds()[-1:] == [3])
    third.kill()
    until(lambda: first.worlds()[-1:] == [2] and second.worlds()[-1:] == [2])
    (tmp_path / "go").touch()
    assert [first.process.wait(300), second.process.wait(300)] == [0, 0], first.log.read_text()
    late = start("late")
    assert late.process.wait(300) == 0, late.log.read_text()
    assert late.worlds() == []


def test_a_failed_run_makes_late_nodes_fail_with_its_message(start):
    failing = start("failing", "1:1", steps=-1, restarts=0)
    until(lambda: failing.process.poll() is not None)
    assert failing.process.returncode != 0
    late = start("late", "1:1")
    until(lambda: late.process.poll() is not None)
    assert late.process.returncode != 0
    assert "A worker failed under torchrun" in late.log.read_text()


def test_bad_endpoints_are_explained(tmp_path):
    result = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=azure-table", "--rdzv-endpoint=ftp://x",
            "--rdzv-id=r", "--nnodes=1", PROGRAM,
        ],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode != 0
    assert "ftp://x" in result.stderr
