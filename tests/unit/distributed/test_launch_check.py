"""The check that a worker's process group is that of the agent."""

from __future__ import annotations

import functools
import socket
from types import ModuleType

import pytest

from azureml_elastic.distributed.launch_check import attach_to_rendezvous, check_rendezvous
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.errors import UsageError

AGENTS = {
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    variables.WORKER: "2 4 10.0.0.4 29400",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.4",
    "MASTER_PORT": "29400",
}


@pytest.fixture
def silent():
    """Return a port of this machine on which nothing listens."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "environ"),
    [
        ("env://", {}),
        ("env://?rank=2&world_size=4", {}),
        ("tcp://10.0.0.4:29400?rank=2&world_size=4", {}),
        ("env://?world_size=3", {}),  # some of the ranks
        ("env://", {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}),
        ("env://", {"RANK": "0", variables.WORKER: ""}),
        ("env://", {"MASTER_PORT": "text"}),  # torch's to say
        ("tcp://?rank=0", {"WORLD_SIZE": ""}),
    ],
)
def test_the_agents_ranks_pass(url, environ):
    check_rendezvous(url, WorkerEnvironment.read({**AGENTS, **environ}), seconds=0.1)


@pytest.mark.parametrize(
    ("url", "environ", "said"),
    [
        ("env://?rank=0&world_size=4", {}, "rank 0 of 4"),
        ("env://", {"RANK": "0", "WORLD_SIZE": "2"}, "rank 0 of 2"),
        ("env://?rank=2&world_size=8", {}, "rank 2 of 8"),
        ("tcp://10.0.0.4:29400?rank=1&world_size=4", {}, "rank 1 of 4"),
    ],
)
def test_another_rank_is_refused_at_once(url, environ, said):
    with pytest.raises(UsageError, match=f"opened as {said}.*as rank 2 of 4.*without init_method") as raised:
        check_rendezvous(url, WorkerEnvironment.read({**AGENTS, **environ}))
    assert f"{variables.INTEGRATIONS}=off" in str(raised.value)


def test_an_address_is_refused_where_nobody_listens(silent):
    with pytest.raises(UsageError, match=f"opened at localhost:{silent}, where nobody has listened"):
        check_rendezvous(
            "env://",
            WorkerEnvironment.read({**AGENTS, "MASTER_ADDR": "localhost", "MASTER_PORT": str(silent)}),
            seconds=0.1,
        )
    with pytest.raises(UsageError, match=f"opened at 127.0.0.1:{silent}"):
        check_rendezvous(f"tcp://127.0.0.1:{silent}?rank=0&world_size=1", WorkerEnvironment.read(AGENTS), seconds=0.1)


def test_a_store_of_the_scripts_own_passes():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_rendezvous(f"tcp://127.0.0.1:{port}?rank=0&world_size=9", WorkerEnvironment.read(AGENTS), seconds=5.0)


def test_the_handlers_of_torch_are_checked_once(monkeypatch):
    torchs = ModuleType("torch.distributed.rendezvous")
    calls = []
    torchs._rendezvous_handlers = {"env": lambda url, **options: calls.append((url, options)), "file": print}
    attach_to_rendezvous(torchs)
    attach_to_rendezvous(torchs)
    checked = torchs._rendezvous_handlers["env"]
    assert isinstance(checked, functools.partial)
    assert torchs._rendezvous_handlers["file"] is print
    for name, value in AGENTS.items():
        monkeypatch.setenv(name, value)
    checked("env://", timeout=3)
    assert calls == [("env://", {"timeout": 3})]
    with pytest.raises(UsageError):
        checked("env://?rank=3", timeout=3)
    assert len(calls) == 1
