"""When the preload server is started before the plan is read, and with what."""

from __future__ import annotations

import json

import pytest

from azureml_elastic.config import ElasticDistribution, ElasticResources, Plan, TableRendezvous
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.forks.import_scan import Findings, Import, early_imports
from azureml_elastic.node.startup.preload import begin_preload, start_early
from azureml_elastic.program.command import Program

PROGRAM = Program(None, (), "script", "train.py", ())


class Server:
    """A server that suits one program."""

    def __init__(self, program, environ):
        self.program, self.environ = program, environ
        self.begun = None
        self.closed = False

    def suits(self, program, environ):
        return program == self.program and environ.get("OMP_NUM_THREADS") == self.environ.get("OMP_NUM_THREADS")

    def begin(self, environ):
        self.begun = dict(environ)

    def close(self):
        self.closed = True


def plan(rendezvous: TableRendezvous | None = None, **distribution) -> str:
    return Plan(
        resources=ElasticResources(max_instance_count=2),
        distribution=ElasticDistribution(**distribution),
        rendezvous=rendezvous or TableRendezvous(),
        name="run",
    ).to_json()


def test_the_first_environment_has_no_secret():
    environ = {
        variables.PLAN: plan(rendezvous=TableRendezvous(connection_string_variable="TABLE")),
        "TABLE": "AccountKey=secret",
        "AZURE_STORAGE_CONNECTION_STRING": "AccountKey=another",
        "PATH": "/bin",
    }
    server = start_early(PROGRAM, NodeEnvironment.read(environ), Server)
    assert server.environ == {variables.PLAN: environ[variables.PLAN], "PATH": "/bin"}


@pytest.mark.parametrize(
    "text",
    [None, "", "{", "[]", "{}", '{"distribution": null}', plan(preload_workers=False), plan(framework="dask")],
)
def test_without_a_plan_that_wants_it_nothing_is_started(text):
    environ = {} if text is None else {variables.PLAN: text}
    assert start_early(PROGRAM, NodeEnvironment.read(environ), lambda *_: pytest.fail("started")) is None


def test_a_plan_of_a_later_release_is_left_to_its_validation():
    document = json.loads(plan())
    document["rendezvous"] = {"name": "another"}
    assert start_early(PROGRAM, NodeEnvironment.read({variables.PLAN: json.dumps(document)}), Server) is None


def test_an_early_server_goes_on_unless_torch_may_have_read_another_environment():
    early = Server(PROGRAM, {"OMP_NUM_THREADS": "1"})
    environ = {"OMP_NUM_THREADS": "1", variables.CHANNEL: "/tmp/channel"}
    assert begin_preload(early, PROGRAM, environ, Server) is early
    assert early.begun == environ
    other = begin_preload(early, PROGRAM, {"OMP_NUM_THREADS": "2"}, Server)
    assert early.closed
    assert (other.environ, other.begun) == ({"OMP_NUM_THREADS": "2"}, {"OMP_NUM_THREADS": "2"})
    engine = Program(None, (), "module", "azureml_elastic.engines", ())
    assert begin_preload(Server(PROGRAM, {}), engine, {}, Server).program == engine
    assert begin_preload(None, PROGRAM, {}, Server).begun == {}


def imports(*names: str) -> tuple[Import, ...]:
    return tuple(map(Import, names))


@pytest.mark.parametrize(
    ("found", "obstacle", "early"),
    [
        (("argparse", "torch", "sklearn.datasets", "azureml_elastic"), None, 3),
        (("torch", "numpy"), None, 2),
        (("numpy", "transformers", "torch"), None, 1),
        (("transformers", "torch"), None, 0),
        (("torch",), "train.py:3 changes os.environ['OMP_NUM_THREADS'] before torch is imported", 0),
        ((), None, 0),
    ],
)
def test_only_the_programs_first_imports_are_made_early(found, obstacle, early):
    """Their order stays: a package that comes before torch in the program is imported before torch."""
    assert early_imports(Findings(imports(*found), obstacle)) == imports(*found)[:early]
