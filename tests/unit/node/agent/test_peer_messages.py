"""The messages of two agents of a round: what each sends reaches the parts of the other."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from azureml_elastic.ipc.agent_messages import Dumped, DumpStacks, HangLesson, Leaving, RanksConnecting, Vote
from azureml_elastic.ipc.worker_messages import Decide, Prepare
from azureml_elastic.node.agent.peer_messages import PeerMessenger
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.inbox import FromLeader, FromMember, Inbox

NODES = ("node-0", "node-1")


class Workers:
    """Workers of one node that agree to every proposal."""

    def __init__(self) -> None:
        self.votes: list[Vote] = []
        self.decisions: list[Decide] = []
        self.placed = True
        self.connected = True
        self.in_session = True
        self.step = 4
        self.finished: frozenset[int] = frozenset()
        self.seconds_left = None

    def prepare(self, proposal: Prepare) -> None:
        self.votes.append(Vote(proposal.boundary, ok=True, step=4, capable=True, finished=False))

    def take_votes(self) -> list[Vote]:
        votes, self.votes = self.votes, []
        return votes

    def decide(self, decision: Decide) -> None:
        self.decisions.append(decision)


class Hangs:
    def __init__(self) -> None:
        self.broadcasts: list[object] = []
        self.dumped: list[str] = []
        self.take = self.broadcasts.append
        self.answered = self.dumped.append

    def begin(self, number: int, members: tuple[str, ...]) -> None:
        pass


class Newcomers:
    """A decision that the test makes."""

    def __init__(self) -> None:
        self.allowed = False
        self.asked = False

    def begin(self, world_size: int, pids) -> None:
        pass

    def nobody_waits(self) -> None:
        pass

    def rest(self) -> None:
        pass

    def may_end_round(self, waiting, *, connected: bool) -> bool:
        self.asked = True
        return self.allowed and connected


class Agents:
    """The messengers of a round; rank 0's hub delivers at once."""

    def __init__(self, *, opens_session: bool = True, runs_engine: bool = False) -> None:
        self._runs_engine = runs_engine
        self._opens_session = opens_session
        self.newcomers = Newcomers()
        self.inboxes = {node: Inbox() for node in NODES}
        self.workers = {node: Workers() for node in NODES}
        self.hangs = {node: Hangs() for node in NODES}
        self.messengers = {node: self.messenger(node) for node in NODES}
        for node, messenger in self.messengers.items():
            members = tuple(Member(name, name) for name in NODES)
            messenger.begin(Round(1, "sealed", members=members), leads=node == NODES[0])

    def messenger(self, node: str) -> PeerMessenger:
        link = SimpleNamespace(
            send=lambda report: self.inboxes[NODES[0]].put(FromMember(1, node, report.body)),
        )
        rendezvous = SimpleNamespace(
            node=node,
            inbox=self.inboxes[node],
            hub=SimpleNamespace(broadcast=self.broadcast),
            membership=SimpleNamespace(link=link),
        )
        return PeerMessenger(
            rendezvous,
            SimpleNamespace(workers=self.workers[node]),
            self.hangs[node],
            opens_session=self._opens_session,
            runs_engine=self._runs_engine,
            newcomers=self.newcomers,
        )

    def broadcast(self, body) -> None:
        for inbox in self.inboxes.values():
            inbox.put(FromLeader(1, body))

    def workers_connect(self) -> None:
        """Have the workers of the round use its store, on rank 0's node."""
        store = SimpleNamespace(ended=False, has_keys=lambda: True)
        self.messengers[NODES[0]].workers_started(2, store, (1,))

    def settle(self) -> None:
        for _ in range(6):
            for messenger in self.messengers.values():
                messenger.process_events()


@pytest.fixture
def agents():
    return Agents()


def lead(agents: Agents, *waiting: str) -> str | None:
    return agents.messengers[NODES[0]].lead(SimpleNamespace(waiting=frozenset(waiting)), done=False)


def test_a_waiting_node_leads_to_a_boundary_that_all_nodes_agree_on(agents):
    assert lead(agents, "node-2") is None
    agents.settle()
    assert [agents.workers[node].decisions for node in NODES] == [[Decide(1, go=True)]] * 2


def test_a_node_that_leaves_does_not_stay(agents):
    agents.messengers["node-1"].announce_leaving()
    agents.messengers["node-1"].announce_leaving()
    assert agents.inboxes["node-0"].take(1) == [FromMember(1, "node-1", Leaving())]
    agents.inboxes["node-0"].put(FromMember(1, "node-1", Leaving()))
    agents.settle()
    assert lead(agents) is None
    agents.settle()
    assert agents.workers["node-0"].decisions == [Decide(1, go=True)]
    assert agents.workers["node-1"].decisions == [Decide(1, go=True, stay=False)]
    assert all(messenger.leavers == {"node-1"} for messenger in agents.messengers.values())


def plain_agents(**options) -> Agents:
    """Agents whose workers have no session."""
    agents = Agents(**options)
    for workers in agents.workers.values():
        workers.in_session = False
    return agents


def test_newcomers_do_not_stop_a_program_without_a_session_at_once():
    agents = plain_agents(opens_session=False)
    agents.workers_connect()
    assert lead(agents, "node-2") is None
    agents.newcomers.allowed = True
    assert lead(agents) is None
    assert lead(agents, "node-2") == "joining: node-2"


def test_all_agents_learn_once_that_workers_have_begun_to_connect():
    """The store in which that shows is that of rank 0's agent, and any agent may have to judge a failure."""
    agents = plain_agents(opens_session=False)
    agents.newcomers.allowed = True
    assert lead(agents, "node-2") is None
    agents.settle()
    assert not any(messenger.connecting for messenger in agents.messengers.values())
    agents.workers_connect()
    for _ in range(2):
        lead(agents)
    assert agents.inboxes["node-1"].take(1) == [FromLeader(1, RanksConnecting())]
    agents.broadcast(RanksConnecting())
    agents.settle()
    assert all(messenger.connecting for messenger in agents.messengers.values())
    for messenger in agents.messengers.values():
        messenger.begin(Round(2, "sealed", members=tuple(Member(name, name) for name in NODES)), leads=False)
        assert not messenger.connecting


def test_a_preempted_node_is_not_held_up_by_the_rules_for_newcomers():
    agents = plain_agents(opens_session=False)
    agents.messengers["node-1"].announce_leaving()
    agents.settle()
    assert lead(agents, "node-2") == "preempted: node-1"
    assert not agents.newcomers.asked


def test_newcomers_join_an_engine_at_once():
    agents = Agents(opens_session=False, runs_engine=True)
    assert lead(agents) is None
    assert lead(agents, "node-2") == "joining: node-2"


def test_a_session_that_opens_late_gets_its_step_boundary(monkeypatch):
    agents = plain_agents()
    agents.newcomers.allowed = True
    assert lead(agents, "node-2") is None
    assert not agents.newcomers.asked, "the imports have 30 s"
    now = time.monotonic() + 31.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    agents.newcomers.allowed = False
    assert lead(agents, "node-2") is None
    assert agents.newcomers.asked
    agents.newcomers.asked = False
    for workers in agents.workers.values():
        workers.in_session = True
    agents.newcomers.allowed = True
    assert lead(agents, "node-2") is None
    assert not agents.newcomers.asked
    agents.settle()
    assert agents.workers["node-0"].decisions == [Decide(1, go=True)]


def test_messages_about_hangs_reach_their_response(agents):
    lesson, dump = HangLesson(3.0, 4.0), DumpStacks(1, 5, 9.0, 8.0, "step")
    agents.broadcast(lesson)
    agents.broadcast(dump)
    agents.inboxes["node-0"].put(FromMember(1, "node-1", Dumped()))
    agents.settle()
    assert [agents.hangs[node].broadcasts for node in NODES] == [[lesson, dump]] * 2
    assert agents.hangs["node-0"].dumped == ["node-1"]


def test_an_inbox_drops_events_of_earlier_rounds_and_keeps_those_of_later_ones():
    inbox = Inbox()
    events = [FromMember(number, "node-0", Leaving()) for number in (1, 3, 2, 2)]
    for event in events:
        inbox.put(event)
    assert inbox.take(2) == events[2:]
    assert inbox.take(2) == []
    assert inbox.take(3) == [events[1]]
