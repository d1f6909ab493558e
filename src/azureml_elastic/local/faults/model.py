"""Faults of a local cluster as data; ``schedule.py`` parses and draws schedules of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from azureml_elastic.errors import UsageError

Lie = Literal["missing", "keyless", "refused", "foreign"]
Trouble = Literal["outage", "throttle", "timeout", "reset", "slow", "half", "garbage", "any", Lie]
"""Kinds of table faults, see :class:`Disturbance`."""

LIES: tuple[Lie, ...] = get_args(Lie)
TROUBLES: tuple[Trouble, ...] = (*get_args(Trouble),)
_OF_CALLS: tuple[Trouble, ...] = tuple(kind for kind in TROUBLES if kind not in ("outage", "any", *LIES))


@dataclass(frozen=True)
class Disturbance:
    """One kind of table fault and the calls that it affects.

    ========  ================================================================================================
    outage    connections are refused, open ones are reset; a call in progress loses its response
    throttle  HTTP 503 ``ServerBusy``, with or without ``Retry-After``; the call does not reach the table
    timeout   no response until the client closes the connection
    reset     the connection is reset instead of a response
    slow      the response is delayed, or the call reaches the table late, perhaps after the client gave up
    half      the call is carried out, half of the response is sent, then the connection is reset
    garbage   an HTML page, as from a gateway in between, with a status of its own
    any       one of the above but ``outage``, drawn for each call
    missing   HTTP 404 with the table's own code, as if there were no such row, to every call
    keyless   JSON documents of another form: rows without keys, versions and values
    refused   HTTP 412 to every write, as if the row had changed meanwhile; reads tell what the row is
    foreign   answers of other services: a blob store, a metadata service, a proxy
    ========  ================================================================================================

    Args:
        share: share of the calls that are affected, in (0, 1]; an outage affects all.
        arrives: whether a call without a proper response still reaches the table; for ``slow``, whether the response
            (true) or the call (false) is delayed. ``None`` draws it for each call.
        delay_s: minimum and maximum delay of ``slow`` in seconds.
        retry_after_s: values of ``Retry-After`` to draw from for ``throttle``; 0 for no such header.
        statuses: statuses to draw from for ``garbage``.
        methods: HTTP methods of the affected calls; empty for all.
        about: text, such as a row key, in the path or body of the affected calls; empty for all.
        times: maximum number of affected calls, ``None`` for no limit.

    Raises:
        UsageError: a value is out of range.
    """

    kind: Trouble
    share: float = 1.0
    arrives: bool | None = None
    delay_s: tuple[float, float] = (2.0, 20.0)
    retry_after_s: tuple[int, ...] = (0, 1, 3)
    statuses: tuple[int, ...] = (502, 504, 404, 200)
    methods: tuple[str, ...] = ()
    about: str = ""
    times: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in TROUBLES:
            raise UsageError(f"The table fault {self.kind!r} is unknown. Give one of {', '.join(TROUBLES)}.")
        if not 0 < self.share <= 1:
            raise UsageError(f"share={self.share:g} of the calls is out of range; give more than 0 and at most 1.")
        if self.kind == "outage" and (self.share, self.methods, self.about, self.times) != (1.0, (), "", None):
            raise UsageError("An outage affects every call: leave out share, methods, about and times, or use 'reset'.")

    def concerns(self, method: str, text: str) -> bool:
        """Return whether a call with this method, and with this path and body, may be affected."""
        return (not self.methods or method in self.methods) and self.about in text


@dataclass(frozen=True)
class Fate:
    """The fault of one call.

    Args:
        arrives: whether the call reaches the table, see :class:`Disturbance`.
        retry_after_s: value of ``Retry-After`` for ``throttle``, 0 for no such header.
    """

    source: Disturbance
    kind: Trouble
    arrives: bool
    delay_s: float = 0.0
    retry_after_s: int = 0
    status: int = 502


def draw(disturbances: Sequence[Disturbance], seed: str) -> Fate | None:
    """Return the first fault that affects a call, ``None`` if none does.

    Args:
        disturbances: faults that may affect the call.
    """
    rng = random.Random(seed)
    for disturbance in disturbances:
        if rng.random() >= disturbance.share:
            continue
        kind = rng.choice(_OF_CALLS) if disturbance.kind == "any" else disturbance.kind
        arrives = rng.random() < 0.5 if disturbance.arrives is None else disturbance.arrives  # noqa: PLR2004
        return Fate(
            disturbance,
            kind,
            # Half a response is that of a call that was carried out; what is throttled or lied about is not.
            arrives=kind == "half" or (arrives and kind not in ("throttle", "outage", *LIES)),
            delay_s=rng.uniform(*disturbance.delay_s) if kind == "slow" else 0.0,
            retry_after_s=rng.choice(disturbance.retry_after_s) if kind == "throttle" else 0,
            status=rng.choice(disturbance.statuses),
        )
    return None


DEFAULT_NOTICE_S = 30.0

MOST_NODES = 256
"""Most nodes that a run may start with on one machine, and that one fault may add."""


@dataclass(frozen=True)
class AtStep:
    """Time of a fault: once this many training steps are completed.

    Args:
        least: least number of nodes in the newest round, without which the fault waits.
    """

    step: int
    least: int = 0
    most: int = MOST_NODES

    def __str__(self) -> str:
        return f"step:{self.step}"


@dataclass(frozen=True)
class AfterSeconds:
    """Time of a fault: seconds of training, see ``schedule.training_seconds``."""

    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:g}s"


When = AtStep | AfterSeconds


@dataclass(frozen=True)
class Kill:
    """SIGKILL to the node and all its processes."""

    target: str
    when: When

    def __str__(self) -> str:
        return f"kill={self.target}@{self.when}"


@dataclass(frozen=True)
class Preempt:
    """SIGTERM to the node's agent, and SIGKILL to the whole node after the notice."""

    target: str
    when: When
    notice_s: float = DEFAULT_NOTICE_S

    def __str__(self) -> str:
        return f"preempt={self.target}@{self.when}/{self.notice_s:g}s"


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP to the node and all its processes, and SIGCONT after the duration, if there is one."""

    target: str
    when: When
    duration_s: float | None = None

    def __str__(self) -> str:
        return f"freeze={self.target}@{self.when}" + ("" if self.duration_s is None else f"/{self.duration_s:g}s")


@dataclass(frozen=True)
class Add:
    """Start of new nodes."""

    when: When
    count: int = 1

    def __str__(self) -> str:
        return f"add@{self.when}" if self.count == 1 else f"add={self.count}@{self.when}"


@dataclass(frozen=True)
class TableTrouble:
    """Fault between all nodes and the table, see :class:`~azureml_elastic.local.faults.model.Disturbance`.

    Args:
        duration_s: duration in seconds, ``None`` for the rest of the run.
        percent: share of the calls that are affected, 1 to 100.
    """

    trouble: Trouble
    when: When
    duration_s: float | None = None
    percent: int = 100

    @property
    def disturbance(self) -> Disturbance:
        """The fault as the proxy takes it."""
        return Disturbance(self.trouble, share=self.percent / 100)

    def __str__(self) -> str:
        share = "" if self.percent == 100 else f":{self.percent}%"  # noqa: PLR2004
        lasts = "" if self.duration_s is None else f"/{self.duration_s:g}s"
        return f"table={self.trouble}{share}@{self.when}{lasts}"


Fault = Kill | Preempt | Freeze | Add | TableTrouble


@dataclass(frozen=True)
class Schedule:
    """Schedule of faults.

    Args:
        seed: random seed for the targets of ``any`` and for the affected calls to the table.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @property
    def disturbs_table(self) -> bool:
        """Whether there are table faults, which require a proxy."""
        return any(isinstance(fault, TableTrouble) for fault in self.faults)

    def __str__(self) -> str:
        return ",".join(str(fault) for fault in self.faults)
