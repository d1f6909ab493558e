"""Views of a running local cluster, a live table or plain lines, and its state, which follows from its events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    CheckpointQuarantined,
    Event,
    HangDetected,
    HealthChecked,
    HostQuarantined,
    HostStruck,
    NodeLeft,
    NodeReady,
    NodeStarted,
    Progress,
    Restored,
    RoundEntered,
    RoundReopened,
    RunEnded,
    TrainsWithoutSession,
    Unreachable,
    WorkerFailed,
    WorkersStarted,
)
from azureml_elastic.ledger.timeline import headline, reason_and_losses
from azureml_elastic.log_lines import message_of_line
from azureml_elastic.plurals import counted

__all__ = [
    "Board",
    "LiveView",
    "NodePicture",
    "PlainView",
    "UntilBroken",
    "View",
    "choose_view",
    "describe",
    "sparkline",
    "state_of_job",
]


@dataclass(frozen=True)
class NodePicture:
    """State of one node.

    Args:
        state: short description for people.
        rank: rank in the newest round.
        round: number of the newest round, 0 before the first.
        alive: whether the agent runs.
        expected: whether it has recorded nothing yet.
    """

    name: str
    state: str = "starting"
    rank: int | None = None
    round: int = 0
    step: int = 0
    alive: bool = True
    expected: bool = True


@dataclass
class Board:
    """Latest state of all nodes and of the run."""

    nodes: dict[str, NodePicture] = field(default_factory=dict)
    round: int = 0
    members: tuple[str, ...] = ()
    sizes: list[int] = field(default_factory=list)
    """World sizes of the sealed rounds so far."""
    workers_started: bool = False
    """Whether workers were started."""
    training: bool = False
    """Whether a session has reported a step: one that it begins with, or one that it has completed."""
    without_session: bool = False
    """Whether workers have opened no session, though they have had the time for it."""
    step: int = 0
    checkpoint_step: int = 0
    ended: RunEnded | None = None
    failure: WorkerFailed | None = None

    @property
    def rank0(self) -> str | None:
        """Node that hosts rank 0 in the newest round."""
        return self.members[0] if self.members else None

    def expect(self, name: str, state: str = "starting") -> None:
        """Set the state of a node that has yet to record its first event."""
        if self.nodes.get(name, NodePicture(name)).expected:
            self.nodes[name] = NodePicture(name, state)

    def set_state(self, name: str, state: str, *, alive: bool = True) -> None:
        """Set the state of a node after an injected fault or its exit."""
        self.nodes[name] = replace(self.nodes[name], state=state, alive=alive)

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events; the events of one node must be in order."""
        for event in events:
            self._apply_to_run(event)
            node = self.nodes.get(event.node, NodePicture(event.node))
            self.nodes[event.node] = _picture(node, event)

    def _apply_to_run(self, event: Event) -> None:
        # Each member reports a round, and a slow one perhaps after a newer round has begun.
        if isinstance(event, RoundEntered) and event.round > self.round:
            self.round, self.members = event.round, event.members
            self.sizes.append(event.world_size)
        elif isinstance(event, WorkersStarted):
            self.workers_started = True
        elif isinstance(event, Restored):
            self.training = True
        elif isinstance(event, TrainsWithoutSession):
            self.without_session = True
        elif isinstance(event, Progress):
            self.training = True
            self.step = max(self.step, event.step)
        elif isinstance(event, CheckpointCommitted):
            self.checkpoint_step = max(self.checkpoint_step, event.step)
        elif isinstance(event, WorkerFailed):
            self.failure = event
        elif isinstance(event, RunEnded):
            self.ended = event


def _picture(node: NodePicture, event: Event) -> NodePicture:
    """Return the node after the event; an ended node keeps its state."""
    node = replace(node, expected=False)
    if isinstance(event, RoundEntered):
        node = replace(node, round=event.round, rank=event.rank)
    elif isinstance(event, Progress):
        node = replace(node, step=event.step)
    unhealthy = isinstance(event, HealthChecked) and event.status == "fail"
    state = "unhealthy" if unhealthy else _STATES.get(type(event))
    return replace(node, state=state) if state is not None and node.alive else node


_STATES: dict[type[Event], str] = {
    NodeStarted: "starting",
    HealthChecked: "preparing",
    NodeReady: "joining",
    HostQuarantined: "quarantined",
    RoundEntered: "joined",
    WorkersStarted: "workers started",
    Progress: "training",
    RoundReopened: "re-forming",
    WorkerFailed: "worker failed",
    HangDetected: "hung",
    NodeLeft: "leaving",
}


_log = logging.getLogger(__name__)

_BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {
    "training": "green",
    "workers started": "cyan",
    "joined": "cyan",
    "re-forming": "yellow",
    "worker failed": "red",
    "hung": "red",
    "unhealthy": "red",
    "quarantined": "yellow",
    "killed": "red",
    "preempted": "magenta",
    "frozen": "blue",
}


class View:
    """View of a run, a context manager for the duration of the run; the base class shows nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def note(self, text: str) -> None:
        """Show an action of the launcher."""

    def events(self, board: Board, events: Sequence[Event]) -> None:
        """Show new events, which the board already includes."""

    def output(self, node: str, lines: Iterable[str]) -> None:
        """Show output lines of a node."""


class UntilBroken(View):
    """View that shows a run in another view until that one fails, as when its terminal is closed."""

    def __init__(self, view: View) -> None:
        self._view: View | None = view

    def __enter__(self) -> Self:
        self._show(lambda view: view.__enter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._show(lambda view: view.__exit__(None, None, None))

    def note(self, text: str) -> None:
        """Show the line."""
        self._show(lambda view: view.note(text))

    def events(self, board: Board, events: Sequence[Event]) -> None:
        """Show the events."""
        self._show(lambda view: view.events(board, events))

    def output(self, node: str, lines: Iterable[str]) -> None:
        """Show the lines."""
        self._show(lambda view: view.output(node, lines))

    def _show(self, action: Callable[[View], object]) -> None:
        if self._view is not None:
            try:
                action(self._view)
            except OSError as error:
                self._view = None
                _log.warning("The run can no longer be shown, and continues: %s", error)


class PlainView(View):
    """View that prints one line per event and per line of output, in the order of arrival."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._printed: set[tuple[str, int]] = set()

    def note(self, text: str) -> None:
        """Print the line."""
        self._print(f"* {text}")

    def events(self, board: Board, events: Sequence[Event]) -> None:  # noqa: ARG002 - the board is not shown
        """Print a line for each event that has a description, and one line per round for all its members."""
        for event in events:
            text = describe(event)
            if text is None:
                continue
            key = (text, event.round)
            if not (isinstance(event, RoundEntered) and key in self._printed):
                self._printed.add(key)
                self._print(f"* {text}")

    def output(self, node: str, lines: Iterable[str]) -> None:
        """Print the lines after the node's name."""
        for line in lines:
            self._print(f"{node} | {line}")

    def _print(self, text: str) -> None:
        # What a program prints may look like markup of rich.
        self._console.print(text, markup=False, emoji=False, highlight=False, soft_wrap=True)


class LiveView(View):
    """View that redraws a table of the nodes in place.

    Args:
        console: console of a terminal.
    """

    def __init__(self, console: Console) -> None:
        self._board = Board()
        self._last_output: dict[str, str] = {}
        self._notes: list[str] = []
        self._live = Live(console=console, get_renderable=self._render, refresh_per_second=8, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def note(self, text: str) -> None:
        """Show the line among the five newest ones below the table."""
        self._notes = [*self._notes[-4:], text]

    def events(self, board: Board, events: Sequence[Event]) -> None:
        """Show the board and the descriptions of the newest events."""
        self._board = board
        for event in events:
            text = describe(event)
            # All members of a round report its start in the same words.
            if text is not None and text not in self._notes:
                self.note(text)

    def output(self, node: str, lines: Iterable[str]) -> None:
        """Show the node's last line; its log has all of them."""
        for line in lines:
            if line.strip():
                self._last_output[node] = message_of_line(line)

    def _render(self) -> RenderableType:
        board = self._board
        table = Table(expand=True, title_justify="left")
        table.title = Text(f"round {board.round} · step {board.step} · world size {sparkline(board.sizes)}")
        for heading in ("node", "rank", "round", "step", "state"):
            table.add_column(heading, no_wrap=True)
        table.add_column("last output", ratio=1, no_wrap=True, overflow="ellipsis")
        # The drawing thread is not the one that adds nodes.
        for node in list(board.nodes.values()):
            in_round = node.alive and node.name in board.members
            table.add_row(
                node.name,
                str(node.rank) if in_round and node.rank is not None else "",
                str(node.round) if node.round else "",
                str(node.step) if node.step else "",
                Text(node.state, style=_COLOURS.get(node.state, "dim")),
                Text(self._last_output.get(node.name, ""), style="dim"),
            )
        return Group(table, *(Text(f"· {note}", style="dim") for note in self._notes))


def choose_view(console: Console, *, live: bool | None = None) -> View:
    """Return the live view on a terminal and the plain one elsewhere, unless ``live`` decides."""
    return LiveView(console) if (console.is_terminal if live is None else live) else PlainView(console)


def state_of_job(status: str) -> str:
    """Return the state of a node that has recorded nothing yet by the status of its job."""
    return "starting" if status == "Running" else status.lower()


def describe(event: Event) -> str | None:
    """Return a one-line description of an event, ``None`` for events that are not shown."""
    if isinstance(event, NodeStarted):
        return f"{event.node} has started"
    if isinstance(event, RoundEntered):
        return f"round {event.round}: {counted(event.world_size, 'worker')} on {', '.join(event.members)}"
    if isinstance(event, Restored):
        start = f"training goes on after step {event.step}" if event.step else "starts from scratch"
        return f"round {event.round}: {start}"
    if isinstance(event, CheckpointCommitted):
        return f"checkpoint of step {event.step} committed (training paused for {event.seconds * 1000:.0f} ms)"
    if isinstance(event, CheckpointQuarantined):
        return f"the checkpoint {event.directory} is damaged, an older one is used: {event.problems}"
    if isinstance(event, WorkerFailed):
        return f"{event.process} on {event.node} exited with {event.exit_code}: {headline(event.message)}"
    if isinstance(event, HealthChecked) and event.problems:
        return f"{event.node} is {'unhealthy' if event.status == 'fail' else 'warned'}: {'; '.join(event.problems)}"
    if isinstance(event, HostStruck):
        return f"a strike against {event.host}: {event.reason}"
    if isinstance(event, HostQuarantined):
        return f"{event.node} is quarantined: {counted(event.strikes, 'strike')} against {event.host}"
    if isinstance(event, Unreachable):
        where = f"{event.peer} ({event.address}), {event.purpose}"
        return f"{event.node} ({event.host}) cannot reach {where}: {event.error}"
    if isinstance(event, HangDetected):
        return (
            f"round {event.round}: no step for {event.seconds:.1f} s (limit {event.limit_seconds:.1f} s); the stacks "
            "of all workers are in the nodes' logs"
        )
    if isinstance(event, RoundReopened):
        return f"round {event.round} ends: {reason_and_losses(event.reason, event.lost)}"
    if isinstance(event, NodeLeft):
        return f"{event.node} leaves: {event.reason}"
    if isinstance(event, RunEnded):
        return "the run succeeded" if event.succeeded else f"the run failed: {headline(event.message)}"
    return None


def sparkline(sizes: Sequence[int], width: int = 40) -> str:
    """Return the newest sizes as bars, followed by the last one as a number."""
    shown = sizes[-width:]
    if not shown:
        return "-"
    largest = max(shown)
    return "".join(_BARS[round(size / largest * (len(_BARS) - 1))] for size in shown) + f" {shown[-1]}"
