"""A lost peer costs no completed step: the survivors hand their state over, or continue in a new process group."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST
from tests.support.train import recovering
from tests.support.train.fake_agent import FakeAgent
from tests.support.worlds import World, store_on_a_free_port

EPOCHS = 5
STEPS = EPOCHS * 4


class Rounds(FakeAgent):
    """An agent that assigns ranks to parked workers once the expected number waits."""

    def __init__(self, path):
        super().__init__(path)
        self.places = threading.Semaphore(0)
        self.waiting = {}
        self.size = 0
        self.number = 0
        self.stores = []

    def _on_message(self, connection, message):
        super()._on_message(connection, message)
        if message["op"] == "parked":
            self.waiting[connection.state["local_rank"]] = connection
            self._assign()

    def expect(self, size):
        """Start a round of this size once as many workers wait."""
        self.size = size
        self._assign()

    def interrupt(self, victim=2):
        """Send the end of the round to all but the victim, whose agent is lost with it."""
        for connection in self.server.connections:
            if connection.state["local_rank"] != victim:
                connection.send({"op": "interrupt"})

    def _assign(self):
        if self.size == 0 or len(self.waiting) < self.size:
            return
        self.stores.append(store_on_a_free_port())
        port = self.stores[-1].port
        self.number += 1
        chosen, self.waiting, size = dict(sorted(self.waiting.items())), {}, self.size
        self.size = 0
        for rank, connection in enumerate(chosen.values()):
            connection.state.update(round=self.number, rank=rank)
            environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
            place = {"op": "assign", "round": self.number, "rank": rank, "world_size": size}
            connection.send({**place, "environment": environment})


@pytest.fixture
def agent(tmp_path):
    with closing(Rounds(tmp_path / "agent")) as fake:
        yield fake
        for descriptor in fake.kept:
            os.close(descriptor)


def environment(agent, number, victim):
    return {"AZUREML_ELASTIC_CHANNEL": agent.path, "AZUREML_ELASTIC_ROUND": number, "VICTIM": victim}


def until_hit(process):
    """Wait until a process is dead or frozen."""
    over = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    with suppress(psutil.NoSuchProcess):
        recovering.until(lambda: psutil.Process(process.pid).status() in over)


def queued(process):
    """Return the number of bytes queued in the connections of a process."""
    ports = {each.laddr.port for each in psutil.Process(process.pid).net_connections("tcp4") if each.raddr}
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(int(line[4].split(":")[0], 16) for line in table if int(line[1].split(":")[1], 16) in ports)


def undisturbed(tmp_path):
    return World(2, recovering.train_on, tmp_path / "alone", EPOCHS).values()[0][-1]


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_survivors_hand_over_and_new_processes_continue(agent, tmp_path, fault):
    arguments = (tmp_path / "c", EPOCHS, fault, 9)
    world = World(3, recovering.train_on, *arguments, **environment(agent, 1, victim=2))
    received = agent.wait_for_all(connected=3, step=3 * 8)
    assert {rank for rank, _ in received["connected"]} == {0, 1, 2}
    until_hit(world.processes[2])
    agent.interrupt()
    agent.wait_for("gone", 2)
    world.processes[2].kill()
    codes = [outcome.code for outcome in world.outcomes()]
    assert codes == [EXIT_AGENT_LOST, EXIT_AGENT_LOST, -signal.SIGKILL]
    assert agent.memory["step"] == 8
    values = World(2, recovering.train_on, tmp_path / "c", EPOCHS, **environment(agent, 2, victim=-1)).values()
    assert [value[:3] for value in values] == [[8, STEPS, 2]] * 2
    assert values[0][-2] == STEPS
    assert values[0][-1] == pytest.approx(undisturbed(tmp_path), abs=1e-9)


@pytest.mark.parametrize("normalised", [False, True], ids=["plain", "buffers"])
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_survivors_continue_and_a_new_process_joins(agent, tmp_path, fault, normalised):
    arguments = (tmp_path / "c", EPOCHS, fault, 9, normalised)
    agent.expect(3)
    world = World(3, recovering.train_on, *arguments, **environment(agent, 0, victim=2))
    received = agent.wait_for_all(connected=3, step=3 * 8)
    assert {rank for rank, _ in received["connected"]} == {0, 1, 2}
    until_hit(world.processes[2])
    agent.interrupt()
    agent.expect(2)
    ((_, restored),) = agent.wait_for_all(connected=2, restored=1)["restored"]
    assert restored["step"] == 8
    world.processes[2].kill()
    outcomes = world.outcomes()
    assert [outcome.code for outcome in outcomes] == [0, 0, -signal.SIGKILL], outcomes
    values = [outcome.value for outcome in outcomes[:2]]
    assert [value[1:3] for value in values] == [[STEPS, 2]] * 2
    assert {value[3] for value in values} == {process.pid for process in world.processes[:2]}
    assert {value[4] for value in values} == {STEPS}
    assert values[0][-1] == values[1][-1]
    if not normalised:
        assert values[0][-1] == pytest.approx(undisturbed(tmp_path), abs=1e-9)


def test_a_lost_peer_met_by_the_scripts_own_collective_costs_nothing_either(agent, tmp_path):
    world = World(2, recovering.user_collective, tmp_path / "c", 5, **environment(agent, 1, victim=1))
    agent.wait_for("gone")
    agent.interrupt(victim=1)
    assert [outcome.code for outcome in world.outcomes()] == [EXIT_AGENT_LOST, -signal.SIGKILL]
    assert agent.memory["step"] == 5


def test_a_send_that_gloo_forgets_costs_nothing_either(agent, tmp_path):
    world = World(2, recovering.send_much, tmp_path / "c", 5, **environment(agent, 1, victim=1))
    agent.wait_for("step", 2 * 5)
    recovering.until(lambda: queued(world.processes[0]) > 1 << 16)  # it has filled the connection, and waits
    agent.interrupt(victim=1)
    agent.wait_for("gone")
    world.processes[1].kill()
    assert [outcome.code for outcome in world.outcomes()] == [EXIT_AGENT_LOST, -signal.SIGKILL]
    assert agent.memory["step"] == 5


def test_a_rank_that_is_a_step_behind_catches_up(tmp_path):
    first, second = World(2, recovering.different_steps, tmp_path).values()
    assert first == second
    assert first[:2] == [4, 48]


def test_an_abort_keeps_connections_of_other_threads(tmp_path):
    assert World(2, recovering.abort_beside_other_connections, tmp_path / "c").values() == [[True, b"open"], [True]]
