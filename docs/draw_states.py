"""Draw the states of a node into ``docs/explanation/internals.md``: ``python docs/draw_states.py``.

The states are those of the machines' enums, and the arrows what nodes did in a thousand random schedules of faults.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "internals.md"

SCHEDULES = 1000
RARE = 3
"""An arrow that fewer transitions have gone is left out."""


def transitions() -> Counter[tuple[Enum, str, Enum]]:
    """Return how often each state has followed another, by the event."""
    from tests.support.schedules.schedule import Schedule

    counted: Counter[tuple[Enum, str, Enum]] = Counter()
    for seed in range(SCHEDULES):
        schedule = Schedule(seed)
        schedule.run()
        counted += schedule.transitions
    return counted


def diagram(states: type[Enum], counted: Counter[tuple[Enum, str, Enum]]) -> str:
    """Return the diagram of one machine, in the language of Mermaid."""
    arrows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (before, event, after), count in sorted(counted.items(), key=lambda item: -item[1]):
        if isinstance(before, states) and count >= RARE:
            arrows[before.name, after.name].append(event)
    first = next(iter(states)).name
    lines = ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}"]
    for state in states:
        for (before, after), events in arrows.items():
            if before == state.name:
                lines.append(f"    {before} --> {after}: {', '.join(events[:3])}{', ...' if events[3:] else ''}")
        if not any(before == state.name for before, _ in arrows):
            lines.append(f"    {state.name} --> [*]")
    return "\n".join([*lines, "```"])


def main() -> None:
    """Write the diagrams between the page's markers."""
    from azureml_elastic.node.core.joiner import JoinState
    from azureml_elastic.node.core.training import State

    counted, page = transitions(), PAGE.read_text()
    for name, states in (("joining", JoinState), ("training", State)):
        drawn = diagram(states, counted)
        pattern = rf"(<!-- states of {name} -->\n).*?(<!-- end -->)"
        page, replaced = re.subn(
            pattern, lambda found, drawn=drawn: f"{found[1]}{drawn}\n{found[2]}", page, flags=re.DOTALL
        )
        assert replaced == 1, f"{PAGE} has no place for the states of {name}"
    PAGE.write_text(page)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
