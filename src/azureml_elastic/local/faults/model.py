"""Faults of a local cluster as data; ``schedule.py`` parses and draws schedules of them."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.local.faults.disturbance import Disturbance, Trouble

__all__ = [
    "MOST_NODES",
    "Add",
    "AfterSeconds",
    "AtStep",
    "Fault",
    "Freeze",
    "Kill",
    "Preempt",
    "Schedule",
    "TableTrouble",
    "When",
]

DEFAULT_NOTICE_S = 30.0

MOST_NODES = 256
"""Most nodes that a run may start with on one machine, and that one fault may add."""


@dataclass(frozen=True)
class AtStep:
    """Time of a fault: once this many training steps are completed."""

    step: int

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
    """Fault between all nodes and the table, see :class:`~azureml_elastic.local.faults.disturbance.Disturbance`.

    Args:
        trouble: kind of fault.
        when: start of the fault.
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
        faults: faults, each of which happens once.
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
