"""What can be done to the nodes of a local cluster, as data. ``chaos.py`` reads and draws schedules of it."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.local.faults.disturbance import Disturbance, Trouble

__all__ = [
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


@dataclass(frozen=True)
class AtStep:
    """Once this many training steps are completed."""

    step: int

    def __str__(self) -> str:
        return f"step:{self.step}"


@dataclass(frozen=True)
class AfterSeconds:
    """This long after the first round was sealed."""

    seconds: float

    def __str__(self) -> str:
        return f"{self.seconds:g}s"


When = AtStep | AfterSeconds


@dataclass(frozen=True)
class Kill:
    """SIGKILL for the node and all its processes."""

    target: str
    when: When

    def __str__(self) -> str:
        return f"kill={self.target}@{self.when}"


@dataclass(frozen=True)
class Preempt:
    """SIGTERM for the node's agent, and SIGKILL for all that is left of the node after the notice."""

    target: str
    when: When
    notice_s: float = DEFAULT_NOTICE_S

    def __str__(self) -> str:
        return f"preempt={self.target}@{self.when}/{self.notice_s:g}s"


@dataclass(frozen=True)
class Freeze:
    """SIGSTOP for the node and all its processes, and SIGCONT after the duration, if it has one."""

    target: str
    when: When
    duration_s: float | None = None

    def __str__(self) -> str:
        return f"freeze={self.target}@{self.when}" + ("" if self.duration_s is None else f"/{self.duration_s:g}s")


@dataclass(frozen=True)
class Add:
    """New nodes."""

    when: When
    count: int = 1

    def __str__(self) -> str:
        return f"add@{self.when}" if self.count == 1 else f"add={self.count}@{self.when}"


@dataclass(frozen=True)
class TableTrouble:
    """Trouble between all nodes and the table, see :class:`~azureml_elastic.local.faults.disturbance.Disturbance`.

    Args:
        trouble: its kind.
        when: it begins.
        duration_s: after which it ends, ``None`` for the rest of the run.
        percent: of the calls that are hit, 1 to 100.
    """

    trouble: Trouble
    when: When
    duration_s: float | None = None
    percent: int = 100

    @property
    def disturbance(self) -> Disturbance:
        """What the proxy is told."""
        return Disturbance(self.trouble, share=self.percent / 100)

    def __str__(self) -> str:
        share = "" if self.percent == 100 else f":{self.percent}%"  # noqa: PLR2004
        lasts = "" if self.duration_s is None else f"/{self.duration_s:g}s"
        return f"table={self.trouble}{share}@{self.when}{lasts}"


Fault = Kill | Preempt | Freeze | Add | TableTrouble


@dataclass(frozen=True)
class Schedule:
    """Faults in the order in which they were written.

    Args:
        faults: each happens once.
        seed: draws the victims of ``any``, and the calls to the table that are hit.
    """

    faults: tuple[Fault, ...] = ()
    seed: int = 0

    @property
    def disturbs_table(self) -> bool:
        """Whether the nodes must reach their table through a proxy."""
        return any(isinstance(fault, TableTrouble) for fault in self.faults)

    def __str__(self) -> str:
        return ",".join(str(fault) for fault in self.faults)
