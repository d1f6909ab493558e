"""The stacks of a node's workers as text, in the node's log and in a file of the run's folder."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from azureml_elastic.node.hangs.stack_dump import ProcessStacks, Worker, collect

__all__ = ["StackReporter", "render"]

_LOG = logging.getLogger(__name__)

_LOGGED_PER_PROCESS = 16 * 1024
_LOGGED = 192 * 1024


class StackReporter:
    """Collects and writes the stacks of one node on a thread of its own, so that no worker can hold up the agent.

    Args:
        folder: where the workers' sessions make their files: the one of the agent's socket.
        reports: the folder for the written stacks, ``stacks`` in the run's folder. Each node writes
            ``round-<number>.<node>.txt`` there.
        node: this node's name.
        wake: event, set when it is done.
        seconds: timeout of the collection.
    """

    def __init__(
        self,
        folder: Path,
        reports: Path,
        node: str,
        wake: threading.Event,
        *,
        seconds: float = 2.5,
    ) -> None:
        self._folder = folder
        self._reports = reports
        self._node = node
        self._wake = wake
        self._seconds = seconds
        self._idle = threading.Event()
        self._idle.set()

    @property
    def done(self) -> bool:
        """Whether nothing is being collected now."""
        return self._idle.is_set()

    def start(self, why: str, round_number: int, workers: Iterable[Worker], steps: Mapping[int, int]) -> None:
        """Begin; while an earlier collection goes on nothing happens.

        Args:
            why: what has happened, for the first line.
            round_number: number of the round.
            workers: the processes that the agent has started.
            steps: the last step that each local rank has completed, where it has completed one.
        """
        if not self.done:
            return
        arguments = (f"{self._node}, round {round_number}: {why}", round_number, list(workers), dict(steps))
        self._idle.clear()
        threading.Thread(target=self._run, args=arguments, name="stack-dump", daemon=True).start()

    def _run(self, title: str, round_number: int, workers: list[Worker], steps: Mapping[int, int]) -> None:
        try:
            by_rank = {worker.local_rank: worker for worker in workers}
            found = collect(self._folder, by_rank, seconds=self._seconds)
            path = self._reports / f"round-{round_number}.{self._node}.txt"
            where = f"All of it is in {path}." if self._write(path, render(title, found, steps)) else ""
            limits = {"largest": _LOGGED, "largest_process": _LOGGED_PER_PROCESS}
            _LOG.error("%s%s", render(title, found, steps, **limits), where)
        except Exception:  # noqa: BLE001 - the round shall be restarted all the same
            _LOG.exception("The stacks of this node's workers could not be collected.")
        finally:
            self._idle.set()
            self._wake.set()

    def _write(self, path: Path, text: str) -> bool:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            _LOG.warning("The stacks cannot be written to %s: %s", path, error)
            return False
        return True


def render(
    title: str,
    found: Sequence[ProcessStacks],
    steps: Mapping[int, int],
    *,
    largest: int | None = None,
    largest_process: int | None = None,
) -> str:
    """Return the stacks as a text for people.

    Args:
        title: its first line.
        found: the processes; neighbours of the same name and the same stacks are written once.
        steps: the last step that each local rank has completed.
        largest: characters of the text, ``None`` for all.
        largest_process: characters of one process's stacks, ``None`` for all.
    """
    parts = [f"===== Stacks of {title} =====\n"]
    for _, group in itertools.groupby(found, key=lambda one: (one.name, one.local_rank, one.text, one.remarks)):
        alike = list(group)
        first = alike[0]
        pids = ", ".join(str(one.pid) for one in alike)
        step = f", after step {steps[first.local_rank]}" if first.local_rank in steps else ""
        lines = [f"\n----- {first.name}, pid {pids}{step}: {first.state}"]
        lines.extend(f"({remark})" for remark in first.remarks)
        lines.append(_cut(first.text or "(no stacks)", largest_process))
        parts.append("\n".join(lines) + "\n")
    parts.append(f"\n===== End of the stacks of {title.partition(':')[0]} =====\n")
    return _cut("".join(parts), largest)


def _cut(text: str, largest: int | None) -> str:
    if largest is None or len(text) <= largest:
        return text
    return text[:largest].rpartition("\n")[0] + "\n  (cut here)\n"
