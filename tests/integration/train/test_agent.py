"""The channel to the node's agent, against an agent that is a real server on a real socket."""

from __future__ import annotations

import json
import queue
import threading
from contextlib import closing

import pytest

from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.errors import ElasticError, Fenced, TableUnavailable
from azureml_elastic.ipc.agent_interface import EXIT_AGENT_LOST, WorkerIdentity
from azureml_elastic.ipc.worker_messages import Finished
from azureml_elastic.train.agent_client.channel import ChannelAgent
from tests.support.train import workers
from tests.support.train.fake_agent import FakeAgent
from tests.support.worlds import World

TIMEOUT_S = 60.0


@pytest.fixture
def agent(tmp_path):
    with closing(FakeAgent(tmp_path / "agent")) as fake:
        yield fake


@pytest.fixture
def channel(agent):
    with closing(ChannelAgent(agent.path, WorkerIdentity(0, 1, 4, 7), decision_timeout=TIMEOUT_S)) as opened:
        agent.wait_for("hello")  # before that it would not receive a broadcast
        yield opened


def test_it_introduces_itself_and_asks_and_commits(agent, channel):
    channel.restored(3, "d")
    ((_, restored),) = agent.wait_for("restored")
    assert restored == {"op": "restored", "step": 3, "directory": "d"}
    (connection,) = agent.server.connections
    assert {key: connection.state[key] for key in ("rank", "local_rank", "round")} == {
        "rank": 0,
        "local_rank": 1,
        "round": 7,
    }
    assert channel.pointer() is None
    channel.commit(Reference("d", 3, "x"), 0.25)
    assert channel.pointer() == Reference("d", 3, "x")
    assert agent.commits[0]["seconds"] == 0.25


@pytest.mark.parametrize(
    ("answer", "kind"), [("fenced", Fenced), ("unavailable", TableUnavailable), ("something new", ElasticError)]
)
def test_refusals_become_errors(agent, channel, answer, kind):
    agent.refusals.append({"error": answer, "message": "because of this"})
    with pytest.raises(kind, match="because of this") as caught:
        channel.commit(Reference("d", 3, "x"), 0.0)
    assert type(caught.value) is kind


def prepare(agent, boundary, step, action="save"):
    agent.server.broadcast({"op": "prepare", "boundary": boundary, "step": step, "action": action})
    ((_, answer),) = agent.wait_for("vote")
    assert answer["boundary"] == boundary
    return answer["ok"], answer["step"]


def test_a_boundary_is_promised_only_for_a_step_that_is_to_come(agent, channel):
    assert prepare(agent, 1, 5) == (False, 0)  # not restored yet
    channel.restored(4, None)
    assert prepare(agent, 2, 4) == (False, 4)
    assert prepare(agent, 3, 5) == (True, 4)
    agent.server.broadcast({"op": "decide", "boundary": 3, "go": False})
    assert prepare(agent, 4, 6) == (True, 4)  # the messages arrive in order: the decision has been processed
    assert channel.completed(5) is None
    agent.server.broadcast({"op": "decide", "boundary": 4, "go": True})
    assert channel.completed(6) == "save"
    assert channel.completed(7) is None
    channel.report(Finished(7))
    assert prepare(agent, 5, 9) == (False, 7)


def test_the_loop_waits_at_the_boundary_for_the_decision(agent, channel):
    channel.restored(0, None)
    assert prepare(agent, 1, 1, "leave") == (True, 0)
    actions = queue.Queue()
    loop = threading.Thread(target=lambda: actions.put(channel.completed(1)))
    loop.start()
    agent.wait_for("step")
    with pytest.raises(queue.Empty):
        actions.get(timeout=0.05)
    agent.server.broadcast({"op": "decide", "boundary": 1, "go": True})
    assert actions.get(timeout=TIMEOUT_S) == "leave"
    loop.join()


def test_a_decision_that_does_not_come_fails_the_worker(agent):
    with closing(ChannelAgent(agent.path, WorkerIdentity(0, 0, 1, 1), decision_timeout=0.05)) as channel:
        channel.restored(0, None)
        agent.wait_for("restored")
        assert prepare(agent, 1, 1) == (True, 0)
        with pytest.raises(ElasticError, match=r"boundary 1.*within 0\.05 s"):
            channel.completed(1)


def environment(agent, round_number):
    return {"AZUREML_ELASTIC_CHANNEL": agent.path, "AZUREML_ELASTIC_ROUND": round_number}


def announce(agent, action, ahead, at):
    """Announce a step boundary ``ahead`` of step ``at``, and decide once both workers have agreed."""

    def on_step(connection, step):
        if step == at and connection.state["rank"] == 0:
            agent.on_step = None
            message = {"op": "prepare", "boundary": 1, "step": step + ahead, "action": action}
            agent.server.broadcast(message)

    agent.on_step = on_step


def test_all_workers_leave_at_the_agreed_step_and_the_next_round_goes_on(agent, tmp_path):
    announce(agent, "leave", 20, at=3)
    arguments = (tmp_path / "c", 10_000, None, 3, tmp_path / "announced")
    world = World(2, workers.agent_session, *arguments, **environment(agent, 1))
    answers = agent.wait_for("vote", 2)
    arguments[-1].touch()
    assert [answer["ok"] for _, answer in answers] == [True, True]
    agent.server.broadcast({"op": "decide", "boundary": 1, "go": True})
    stopped = agent.wait_for("stopped", 2)
    assert {rank for rank, _ in stopped} == {0, 1}
    assert {message["step"] for _, message in stopped} == {23}
    assert [outcome.code for outcome in world.outcomes()] == [0, 0]
    assert agent.pointer["step"] == 23
    assert ".round-000001." in agent.pointer["directory"]

    announce(agent, "save", 4, at=26)  # not the last step of an epoch, which is reported with its end
    arguments = (tmp_path / "c", 50, None, 26, tmp_path / "announced again")
    world = World(1, workers.agent_session, *arguments, **environment(agent, 2))
    ((_, restored),) = agent.wait_for("restored")
    assert restored["step"] == 23
    agent.wait_for("vote")
    arguments[-1].touch()
    agent.server.broadcast({"op": "decide", "boundary": 1, "go": True})
    assert world.values() == [[23, 50]]
    ((_, finished),) = agent.wait_for("finished")
    assert finished["step"] == 50
    assert [commit["step"] for commit in agent.commits] == [23, 30, 50]
    assert world_repeats_nothing(agent, tmp_path) == [[50, 50]]


def world_repeats_nothing(agent, tmp_path):
    return World(1, workers.agent_session, tmp_path / "c", 50, None, **environment(agent, 3)).values()


def test_a_fenced_commit_ends_all_workers_and_moves_nothing(agent, tmp_path):
    agent.refusals.append({"error": "fenced", "message": "round 9 has taken over"})
    values = World(2, workers.agent_session, tmp_path / "c", 50, 5, **environment(agent, 1)).values()
    assert [value.startswith("fenced") and "round 9 has taken over" in value for value in values] == [True, True]
    assert agent.pointer is None


def test_a_table_that_is_away_delays_the_commit_only(agent, tmp_path):
    agent.refusals += [{"error": "unavailable", "message": "throttled"}]
    assert World(2, workers.agent_session, tmp_path / "c", 20, 5, **environment(agent, 1)).values() == [[0, 20]] * 2
    assert [commit["step"] for commit in agent.commits] == [10, 15, 20]
    names = sorted(path.name for path in (tmp_path / "c").iterdir())
    assert [name[:17] for name in names] == ["step-000000000015", "step-000000000020"]
    manifest = json.loads((tmp_path / "c" / names[1] / "manifest.json").read_text())
    assert manifest["body"]["parent"]["directory"] == names[0]


def test_workers_do_not_outlive_their_agent(agent, tmp_path):
    reached = threading.Event()
    agent.on_step = lambda connection, step: reached.set() if step == 3 else None
    world = World(2, workers.agent_session, tmp_path / "c", 100_000, None, **environment(agent, 1))
    assert reached.wait(TIMEOUT_S)
    agent.close()
    assert [outcome.code for outcome in world.outcomes()] == [EXIT_AGENT_LOST] * 2


def test_a_worker_whose_round_ends_before_it_has_reached_the_store_does_not_wait_for_it(agent, tmp_path):
    world = World(1, workers.agent_session, tmp_path, 10, None, WORLD_SIZE=2, MASTER_PORT=9, **environment(agent, 1))
    agent.wait_for("hello")
    agent.server.broadcast({"op": "interrupt", "whole": 0})
    assert [outcome.code for outcome in world.outcomes()] == [EXIT_AGENT_LOST]


def test_a_lost_table_does_not_start_the_run_anew(agent, tmp_path):
    (before,) = World(1, workers.agent_session, tmp_path / "c", 20, 5, **environment(agent, 1)).values()
    assert before == [0, 20]
    agent.pointer = None
    (after,) = World(1, workers.agent_session, tmp_path / "c", 30, 5, **environment(agent, 2)).values()
    assert after == [20, 30]


def test_a_damaged_checkpoint_is_reported_and_an_older_one_is_used(agent, tmp_path):
    (before,) = World(1, workers.agent_session, tmp_path / "c", 20, 5, **environment(agent, 1)).values()
    assert before == [0, 20]
    damaged = tmp_path / "c" / agent.pointer["directory"]
    (damaged / "rank-00000.safetensors").write_bytes(b"torn")
    (after,) = World(1, workers.agent_session, tmp_path / "c", 20, 5, **environment(agent, 2)).values()
    assert after == [15, 20]
    ((_, report),) = agent.wait_for("damaged")
    assert report["directory"] == damaged.name
    assert "4 bytes instead of" in report["problems"]
    assert "4 bytes instead of" in (damaged / "damaged").read_text()
