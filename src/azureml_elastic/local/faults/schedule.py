"""Notation of fault schedules, and which faults are due.

A schedule is a list of faults, separated by commas or line ends::

    kill=rank0@step:30          SIGKILL to the node and all its processes
    preempt=node-1@step:30/10s  SIGTERM to the node, SIGKILL to what remains after 10 s (default 30 s)
    freeze=any@20s/5s           SIGSTOP to all its processes, SIGCONT after 5 s (never by default)
    add@step:80                 one more node; ``add=2@15s`` adds two
    table=outage@step:30/5s     the table is unreachable for 5 s (for the rest of the run by default)
    table=slow:20%@10s/5s       every fifth call to the table on average is slow

The kinds of table faults are ``outage``, ``throttle``, ``timeout``, ``reset``, ``slow``, ``half``, ``garbage``,
``any``, ``missing``, ``keyless``, ``refused`` and ``foreign``. They require a table that is reached over plain HTTP,
such as the emulator.

The target is ``node-<k>``, ``rank0`` (the node of rank 0) or ``any`` (drawn from the living nodes with the seed). The
time is ``step:<n>``, once n training steps are completed, or seconds since training began.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from azureml_elastic.errors import ChaosError
from azureml_elastic.ledger.summary import NodeEnding
from azureml_elastic.local.faults.model import (
    DEFAULT_NOTICE_S,
    MOST_NODES,
    TROUBLES,
    Add,
    AfterSeconds,
    AtStep,
    Fault,
    Freeze,
    Kill,
    Preempt,
    Schedule,
    TableTrouble,
    When,
)

_ACCEPTED = (
    "Accepted are kill=TARGET@WHEN, preempt=TARGET@WHEN[/NOTICEs], freeze=TARGET@WHEN[/DURATIONs], "
    "add[=COUNT]@WHEN and table=TROUBLE[:PERCENT%]@WHEN[/DURATIONs], where TARGET is node-<k>, rank0 or any, WHEN is "
    f"step:<n> or <seconds>s, and TROUBLE is {', '.join(TROUBLES)}; "
    "for example kill=rank0@step:30,add@step:60,table=outage@step:40/5s"
)
_FAULT = re.compile(r"(?P<verb>[^=@/]+)(=(?P<target>[^@/]*))?@(?P<when>[^/]*)(/(?P<extra>.*))?")
_TARGET = re.compile(r"node-\d+|rank0|any")
_SECONDS = re.compile(r"(\d+(?:\.\d+)?)s")
_STEP = re.compile(r"step:(\d+)")
_TROUBLE = re.compile(rf"(?P<kind>{'|'.join(TROUBLES)})(:(?P<percent>\d{{1,3}})%)?")


@dataclass(frozen=True)
class ChaosState:
    """State of the cluster that decisions depend on.

    Args:
        seconds: seconds since training began, ``None`` before; see :func:`training_seconds`.
        living: nodes that can be targets: alive, not frozen and without a preemption notice.
        gone: nodes that will not come back.
        rank0: node of rank 0 in the newest round.
        members: number of nodes in the newest round.
        fired: indices of the faults that have happened.
    """

    step: int = 0
    seconds: float | None = None
    living: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    rank0: str | None = None
    members: int = 0
    fired: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Due:
    """A fault that is due now.

    Args:
        victim: target node; ``None`` for ``add``, for table faults and for a target that has already ended.
    """

    index: int
    fault: Fault
    victim: str | None = None


def training_seconds(now: float, first_step: float | None, without_session: float | None) -> float | None:
    """Return the seconds since training began, by which faults at a time in seconds happen; ``None`` before.

    Training begins with the first step that the run reports. A program without a session reports none.

    Args:
        first_step: time at which a step was reported first, ``None`` before.
        without_session: time at which it was known first that the program trains without a session, ``None`` before.
    """
    began = without_session if first_step is None else first_step
    return None if began is None else now - began


def due(schedule: Schedule, state: ChaosState) -> list[Due]:
    """Return the faults that are due now, at most one per node.

    A fault whose target does not exist yet (a node still to be added, rank 0 between two rounds) waits for it.
    """
    decided: list[Due] = []
    living = set(state.living)
    for index, fault in enumerate(schedule.faults):
        if index in state.fired or not reached(fault.when, state):
            continue
        if isinstance(fault, (Add, TableTrouble)) or fault.target in state.gone:
            decided.append(Due(index, fault))
            continue
        # A generator for each fault: what one draws does not depend on when the others were due.
        victim = _victim(fault.target, living, state.rank0, f"{schedule.seed}/{index}")
        if victim is not None:
            living.remove(victim)
            decided.append(Due(index, fault, victim))
    return decided


def reached(when: When, state: ChaosState) -> bool:
    """Return whether the time of a fault has come."""
    if isinstance(when, AtStep):
        return state.step >= when.step and when.least <= state.members <= when.most
    return state.seconds is not None and state.seconds >= when.seconds


def may_add(schedule: Schedule, state: ChaosState) -> bool:
    """Return whether nodes can still be added when none is left: steps no longer advance then, but time does."""
    return any(
        isinstance(fault, Add)
        and index not in state.fired
        and (reached(fault.when, state) or (isinstance(fault.when, AfterSeconds) and state.seconds is not None))
        for index, fault in enumerate(schedule.faults)
    )


def load_schedule(spec: str, seed: int = 0) -> Schedule:
    """Parse the file of that name if there is one, otherwise the text itself.

    Raises:
        ChaosError: the file cannot be read, or an entry is not understood.
    """
    path = Path(spec)
    try:
        is_file = path.is_file()
    except (OSError, ValueError):  # longer than a file name may be
        is_file = False
    if not is_file:
        return parse_schedule(spec, seed)
    try:
        return parse_schedule(path.read_text(encoding="utf-8"), seed)
    except (OSError, UnicodeDecodeError) as error:
        raise ChaosError(f"The fault schedule {path} cannot be read: {error}. Give a text file.") from error


def parse_schedule(text: str, seed: int = 0) -> Schedule:
    """Parse a schedule; ``#`` starts a comment that ends with its line.

    Raises:
        ChaosError: an entry is not understood; the message lists the accepted forms.
    """
    lines = (line.partition("#")[0] for line in text.splitlines())
    entries = (entry.strip() for line in lines for entry in line.split(","))
    return Schedule(tuple(_parse(entry) for entry in entries if entry), seed)


def _victim(target: str, living: set[str], rank0: str | None, seed: str) -> str | None:
    if target == "any":
        return random.Random(seed).choice(sorted(living)) if living else None
    name = rank0 if target == "rank0" else target
    return name if name in living else None


def _parse(entry: str) -> Fault:
    try:
        return _fault(entry)
    except ValueError as error:
        raise ChaosError(f"The fault {entry!r} {error}. {_ACCEPTED}.") from None


def _fault(entry: str) -> Fault:
    """Return the fault of an entry; a ``ValueError`` describes what is wrong with it."""
    match = _FAULT.fullmatch(entry)
    if match is None:
        raise ValueError("is not of the form VERB=TARGET@WHEN")
    verb, target = match["verb"].strip(), (match["target"] or "").strip()
    if verb not in ("kill", "preempt", "freeze", "add", "table"):
        raise ValueError(f"has the unknown verb {verb!r}")
    when = _when(match["when"].strip())
    if match["extra"] is not None and verb in ("kill", "add"):
        raise ValueError(f"has {'/' + match['extra']!r} at its end, which {verb} does not take")
    if verb == "add":
        count = "1" if match["target"] is None else target
        if not count.isdecimal() or not 1 <= int(count) <= MOST_NODES:
            raise ValueError(f"adds {count!r} nodes; give a number from 1 to {MOST_NODES}")
        return Add(when, int(count))
    duration_s = None if match["extra"] is None else _seconds(match["extra"].strip(), "duration")
    if verb == "table":
        return _trouble(target, when, duration_s)
    if not _TARGET.fullmatch(target):
        raise ValueError(f"has the target {target!r}, which names no node")
    if verb == "kill":
        return Kill(target, when)
    if verb == "preempt":
        return Preempt(target, when, DEFAULT_NOTICE_S if duration_s is None else duration_s)
    return Freeze(target, when, duration_s)


def _trouble(text: str, when: When, duration_s: float | None) -> TableTrouble:
    match = _TROUBLE.fullmatch(text)
    if match is None:
        raise ValueError(f"has the unknown table fault {text!r}")
    percent = 100 if match["percent"] is None else int(match["percent"])
    trouble = next(kind for kind in TROUBLES if kind == match["kind"])
    if not 1 <= percent <= 100 or (trouble == "outage" and percent < 100):  # noqa: PLR2004
        raise ValueError(f"affects {percent} % of the calls; give 1 to 100, and none for an outage, which affects all")
    return TableTrouble(trouble, when, duration_s, percent)


def _when(text: str) -> When:
    step = _STEP.fullmatch(text)
    return AfterSeconds(_seconds(text, "time")) if step is None else AtStep(int(step[1]))


def _seconds(text: str, meaning: str) -> float:
    if seconds := _SECONDS.fullmatch(text):
        if math.isinf(value := float(seconds[1])):
            raise ValueError(f"has a {meaning} of {len(seconds[1])} digits, which is infinite; give fewer")
        return value
    raise ValueError(f"has the invalid {meaning} {text!r}")


def reason_missed(fault: Fault, state: ChaosState, endings: Mapping[str, NodeEnding]) -> str:
    """Return why a fault had not been injected when the run ended.

    Args:
        endings: started nodes, in the order of their starts, and how they ended.
    """
    if not reached(fault.when, state):
        return _too_early(fault, state)
    if isinstance(fault, (Add, TableTrouble)):
        return "the run was already ending when its time came"
    if fault.target.startswith("node-") and fault.target not in endings:
        names = list(endings)
        started = " to ".join(dict.fromkeys((names[0], names[-1])))
        return f"there was no {fault.target}; started were {started}"
    if endings.get(fault.target) == "frozen":
        return f"{fault.target} was frozen"
    return "the run was already ending, or had no such node left, when its time came"


def _too_early(fault: Fault, state: ChaosState) -> str:
    if isinstance(fault.when, AtStep):
        if state.step == 0:
            return "the run reported no step; a script without a session needs times in seconds, such as @20s"
        return f"the run ended at step {state.step}"
    if state.seconds is None:
        return "the run ended before it trained"
    return f"the run ended after {state.seconds:.1f} s of training"
