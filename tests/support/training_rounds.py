"""Members of a round as machines: events go in by hand, and what they send reaches the others at once."""

from __future__ import annotations

from dataclasses import replace

from azureml_elastic.config import ElasticDistribution, ElasticResources, Plan, PreemptionPolicy
from azureml_elastic.node.core import actions as do
from azureml_elastic.node.core import events as ev
from azureml_elastic.node.core.failures import Failure
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.core.training import Training

ENTERED = 1000.0
"""Moment at which all members have entered their round."""


def sealed(*names: str, slots: int = 1, **fields) -> Round:
    """Return a sealed round of these nodes."""
    members = tuple(Member(name, f"{name}/1", slots=slots, host_id=f"host of {name}") for name in names)
    return Round(**{"number": 1, "state": "sealed", "members": members, **fields})


def failure(kind: str = "user", exit_code: int = 1, *, fault: str | None = None, codes=None) -> ev.Failures:
    """Return how a worker has failed."""
    cause = Failure(0, exit_code, "ValueError: no", kind, f"signature of {kind}", conclusive=False)
    return ev.Failures(codes or {0: exit_code}, cause, f"exit code {exit_code}", fault)


class TrainingRound:
    """The machines of a round.

    Args:
        names: names of the nodes in rank order.
        slots: number of workers of each.
        opens_session: whether the program uses the library.
        round_: further fields of the round.
        preemption: preemption policy.
        maximum: largest number of nodes of a round; that of the names by default.
        options: fields of the distribution.

    Attributes:
        now: the clock of all.
        machines: by node.
        done: what each node was to do and that is no message, by node, since :meth:`take`.
        sent: the messages, in order.
    """

    def __init__(
        self,
        *names: str,
        slots: int = 1,
        opens_session: bool = True,
        round_=None,
        preemption: PreemptionPolicy | None = None,
        maximum: int | None = None,
        **options,
    ) -> None:
        self.now = ENTERED
        self.round = sealed(*names, slots=slots, **(round_ or {}))
        plan = Plan(
            resources=ElasticResources(max_instance_count=maximum or len(names)),
            distribution=ElasticDistribution(**options),
            preemption=preemption or PreemptionPolicy(),
        )
        self.machines = {
            name: Training(self.round, name, plan, opens_session=opens_session, entered=self.now, now=self.now)
            for name in names
        }
        self.leader = names[0]
        self.done: dict[str, list[do.TrainingAction]] = {name: [] for name in names}
        self.sent: list[object] = []
        self._seen = dict.fromkeys(names, ev.RoundSeen())
        self._workers = dict.fromkeys(names, ev.WorkersSeen())
        session = frozenset(range(slots)) if opens_session else frozenset()
        for name in names:
            self.workers(name, present=session, in_session=opens_session)

    def feed(self, node: str, *events: ev.TrainingEvent) -> list[do.TrainingAction]:
        """Let something happen on a node; return what it is to do, without messages, which arrive everywhere."""
        done: list[do.TrainingAction] = []
        machine = self.machines[node]
        for event in events:
            actions = machine.handle(event, self.now)
            for action in actions:
                match action:
                    case do.ToLeader(body):
                        self.sent.append(body)
                        self.feed(self.leader, ev.FromMember(node, body))
                    case do.ToMembers(body):
                        self.sent.append(body)
                        for other in self.machines:
                            self.feed(other, ev.FromLeader(body))
                    case _:
                        done.append(action)
        self.done[node] += done
        return done

    def sees(self, node: str, **fields) -> list[do.TrainingAction]:
        """Change what a node knows of the round."""
        self._seen[node] = replace(self._seen[node], **fields)
        return self.feed(node, self._seen[node])

    def workers(self, node: str, **fields) -> list[do.TrainingAction]:
        """Change what a node's workers have reported, or how they have ended."""
        self._workers[node] = replace(self._workers[node], **fields)
        return self.feed(node, self._workers[node])

    def exit(self, node: str, *codes: int, **fields) -> list[do.TrainingAction]:
        """Have workers end, from the first one on, with their connections."""
        left = frozenset(range(len(codes), self.round.members[0].slots))
        gone = {"exit_codes": dict(enumerate(codes)), "present": left, "leaving": False}
        return self.workers(node, **{**gone, **fields})

    def wait(self, seconds: float, *nodes: str) -> dict[str, list[do.TrainingAction]]:
        """Let time pass, on all nodes or these; return what they do."""
        self.now += seconds
        return {node: self.feed(node, ev.TimePassed()) for node in nodes or self.machines}

    def take(self, node: str) -> list[do.TrainingAction]:
        """Return, once, what a node was to do."""
        done, self.done[node] = self.done[node], []
        return done
