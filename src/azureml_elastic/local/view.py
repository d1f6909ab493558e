"""Views of a running local cluster: a live table or plain lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from typing_extensions import Self

from azureml_elastic.ledger.events import Event, RoundEntered
from azureml_elastic.ledger.picture import Moment
from azureml_elastic.ledger.sentences import describe
from azureml_elastic.log_lines import message_of_line

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
    "lost": "red",
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

    def events(self, moment: Moment, events: Sequence[Event]) -> None:
        """Show new events, and the state that already includes them."""

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

    def events(self, moment: Moment, events: Sequence[Event]) -> None:
        """Show the events."""
        self._show(lambda view: view.events(moment, events))

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

    def events(self, moment: Moment, events: Sequence[Event]) -> None:  # noqa: ARG002 - the state is not shown
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
    """View that redraws a table of the nodes in place."""

    def __init__(self, console: Console) -> None:
        self._moment = Moment()
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

    def events(self, moment: Moment, events: Sequence[Event]) -> None:
        """Show the state and the descriptions of the newest events."""
        self._moment = moment
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
        moment = self._moment
        table = Table(expand=True, title_justify="left")
        table.title = Text(f"round {moment.round} · step {moment.step or 0} · world size {sparkline(moment.sizes)}")
        for heading in ("node", "rank", "round", "step", "state"):
            table.add_column(heading, no_wrap=True)
        table.add_column("last output", ratio=1, no_wrap=True, overflow="ellipsis")
        for node in moment.nodes:
            in_round = node.alive and node.name in moment.members
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


def sparkline(sizes: Sequence[int], width: int = 40) -> str:
    """Return the newest sizes as bars, followed by the last one as a number."""
    shown = sizes[-width:]
    if not shown:
        return "-"
    largest = max(shown)
    return "".join(_BARS[round(size / largest * (len(_BARS) - 1))] for size in shown) + f" {shown[-1]}"
