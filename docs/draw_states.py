"""Draw the states of a node and of a worker's step into their pages: ``python docs/draw_states.py``.

The states are those of the machines' enums. The arrows of a node are what nodes did in four thousand random schedules
of faults; those of a step are all that its calls do. ``python docs/draw_states.py step`` draws the step alone.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from copy import copy
from enum import Enum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "internals" / "node.md"
STEP_PAGE = ROOT / "docs" / "internals" / "worker.md"

SCHEDULES = 4000
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


def step_calls() -> dict[str, Callable[[Any], object]]:
    """Return the calls of a step's machine, in the words of the page."""
    from azureml_elastic.train.step_state import StepMachine

    return {
        "batch taken": StepMachine.take,
        "loop left": StepMachine.leave,
        "optimizer steps": StepMachine.update,
        "update undone": StepMachine.revert_update,
        "commit": lambda machine: machine.complete(pending=False),
        "commit, code follows": lambda machine: machine.complete(pending=True),
        "save": StepMachine.begin_boundary,
        "boundary done": StepMachine.end_boundary,
        "continued in code": StepMachine.defer,
        "code ended": StepMachine.end_code,
        "round lost, or trained before": StepMachine.discard,
        "undone": StepMachine.undone,
        "another state": StepMachine.restore,
        "restored": lambda machine: machine.restored(in_step=False),
        "restored in a step": lambda machine: machine.restored(in_step=True),
        "finish": StepMachine.finish,
    }


def step_transitions() -> dict[Enum, dict[str, set[Enum]]]:
    """Return the states that each call leads to from each state, without those in which it is a defect."""
    from azureml_elastic.train.step_state import StepMachine, StepState

    found: dict[Enum, dict[str, set[Enum]]] = {state: defaultdict(set) for state in StepState}
    waiting, seen = [StepMachine()], set()
    while waiting:
        machine = waiting.pop()
        if (machine.state, machine.deferred) in seen:
            continue
        seen.add((machine.state, machine.deferred))
        for name, call in step_calls().items():
            after = copy(machine)
            try:
                call(after)
            except RuntimeError:
                continue
            found[machine.state][name].add(after.state)
            waiting.append(after)
    return found


def step_diagram() -> str:
    """Return the diagram of a step, in the language of Mermaid, without other states and the end of the session."""
    left_out = {"another state", "restored", "restored in a step", "finish"}
    lines = ["```mermaid", "stateDiagram-v2"]
    found = step_transitions()
    shown = {state for state in found if state.name not in ("RESTORING", "OVER")}
    lines += [f'    state "{state.value}" as {state.name}' for state in found if state in shown]
    lines.append(f"    [*] --> {next(iter(found)).name}")
    for state in found:
        arrows: dict[str, list[str]] = defaultdict(list)
        for name, targets in found[state].items():
            for target in targets & shown:
                if target is not state and name not in left_out:
                    arrows[target.name].append(name)
        if state in shown:
            lines += [f"    {state.name} --> {after}: {', '.join(names)}" for after, names in sorted(arrows.items())]
    return "\n".join([*lines, "```"])


def put(page: str, name: str, drawn: str) -> str:
    """Return a page with a drawing between its markers."""
    pattern = rf"(<!-- {name} -->\n).*?(<!-- end -->)"
    page, replaced = re.subn(pattern, lambda found: f"{found[1]}{drawn}\n{found[2]}", page, flags=re.DOTALL)
    assert replaced == 1, f"the page has no place for {name!r}"
    return page


def main() -> None:
    """Write the drawings between the pages' markers."""
    STEP_PAGE.write_text(put(STEP_PAGE.read_text(), "states of a step", step_diagram()))
    if sys.argv[1:] == ["step"]:
        return
    from azureml_elastic.node.core.joiner import JoinState
    from azureml_elastic.node.core.training import State

    counted, page = transitions(), PAGE.read_text()
    for name, states in (("joining", JoinState), ("training", State)):
        page = put(page, f"states of {name}", diagram(states, counted))
    PAGE.write_text(page)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
