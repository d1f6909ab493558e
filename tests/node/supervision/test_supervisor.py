"""Supervisors of one run, several at once, that die at any call."""

import random

import pytest

from azureml_elastic.errors import PlanError, WorkspaceUnavailable
from azureml_elastic.node.rendezvous.keys import ROUND_KEY
from azureml_elastic.node.rendezvous.round import Round
from azureml_elastic.node.supervision.jobs import RunRecord
from azureml_elastic.node.supervision.supervisor import Supervisor
from azureml_elastic.node.table.sqlite import SqliteTable
from azureml_elastic.spec import ElasticResources, NodePool, Plan, SupervisionPolicy
from azureml_elastic.spec import environment as variables

POOLS = (NodePool("spot", max_instance_count=2), NodePool("sure", max_instance_count=2))
WORKSPACE = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"


class Broke(Exception):
    """The supervisor's process has died here."""


class FakeJobs:
    """Jobs by name, each a pipeline of steps; ``trouble`` is asked before and after each effect."""

    workspace = WORKSPACE

    def __init__(self, first, document, trouble=lambda _: None):
        self.documents = {first: document}
        self.status = {}
        self.trouble = trouble
        self.submissions = []
        self._begin(first)

    def _begin(self, name):
        for step in self.documents[name].get("jobs") or {name: None}:
            self.status[(name, step)] = "Queued"

    def document(self, name):
        self.trouble("document")
        return self.documents.get(name)

    def submit(self, name, properties):
        self.trouble("before")
        if name in self.documents:
            return False
        self.documents[name] = properties
        self.submissions.append(name)
        self._begin(name)
        self.trouble("after")
        return True

    def cancel(self, name):
        self.trouble("before")
        for job, step in self.status:
            if name in (job, f"{job}/{step}"):
                self.status[job, step] = "Canceled"
        self.trouble("after")

    def record(self, name):
        self.trouble("record")
        if name not in self.documents:
            return None
        steps = [status for (job, _), status in self.status.items() if job == name]
        return self._record(name, "", steps[0] if len(set(steps)) == 1 else "Running")

    def children(self, name):
        self.trouble("children")
        return [
            self._record(f"{name}/{step}", step, status) for (job, step), status in self.status.items() if job == name
        ]

    def _record(self, name, step, status):
        ran = 0.0 if status in ("NotStarted", "Queued") else 7200.0
        return RunRecord(name, step, status, 1.0, ran, 7200.0 if status in ("Completed", "Failed", "Canceled") else 0.0)

    def nodes(self):
        """Return the steps' states by their names; each name is there once."""
        names = [step for _, step in self.status]
        assert len(names) == len(set(names)), names
        return {step: status for (_, step), status in self.status.items()}


def plan(**fields):
    return Plan(
        **{
            "resources": ElasticResources(max_instance_count=2),
            "pools": POOLS,
            "supervision": SupervisionPolicy(retry_after=1, max_replacements=1000),
            **fields,
        }
    )


def pipeline(the_plan, **nodes):
    step = {
        "type": "command",
        "componentId": "component",
        "computeId": f"{WORKSPACE}/computes/spot",
        "resources": {"instance_count": 1},
        "environment_variables": {variables.PLAN: the_plan.to_json(), "MINE": "1"},
        "services": {"tb": {"job_service_type": "TensorBoard"}, "ssh": {"job_service_type": "SSH"}},
    }
    return {
        "jobType": "Pipeline",
        "displayName": "digits",
        "experimentName": "exp",
        "status": "Running",
        "inputs": {"data": {"uri": "u"}},
        "settings": {"force_rerun": True},
        "jobs": {name: {**step, **(fields or {})} for name, fields in nodes.items()},
    }


@pytest.fixture
def table(tmp_path):
    table = SqliteTable(tmp_path / "table.sqlite", "elastic", "run")
    yield table
    table.close()


def close(table, **fields):
    table.insert(ROUND_KEY, Round(**fields).to_value())


def test_what_brings_a_node_is_the_first_job_with_that_node_alone(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    jobs.status["run", "spot_0"] = "Running"
    jobs.status["run", "spot_1"] = "Failed"
    outlook = Supervisor(jobs, table, "run", "run").act()
    assert outlook.done == ("submitted run-spot-2: a node was lost",)
    made = jobs.documents["run-spot-2"]
    assert made["displayName"] == "digits, spot_2"
    assert (made["experimentName"], made["inputs"], made["settings"]) == (
        "exp",
        {"data": {"uri": "u"}},
        {"force_rerun": True},
    )
    assert "status" not in made
    ((name, step),) = made["jobs"].items()
    assert name == step["display_name"] == "spot_2"
    assert step["environment_variables"] == {
        variables.PLAN: plan().to_json(),
        "MINE": "1",
        variables.RUN_ID: "run",
        variables.FIRST_JOB: "run",
    }
    assert step["services"] == {"ssh": {"job_service_type": "SSH"}}
    assert step["computeId"].endswith("/computes/spot")
    assert Supervisor(jobs, table, "run", "run").act().done == ()


def test_a_node_of_a_pool_that_has_none_yet_is_put_onto_its_compute(table):
    sure = NodePool("serverless", max_instance_count=2, instance_type="Standard_NC6s_v3", job_tier="Spot")
    jobs = FakeJobs("run", pipeline(plan(pools=(POOLS[0], sure)), spot_0=None, spot_1=None))
    jobs.status = dict.fromkeys(jobs.status, "Queued")
    policy = SupervisionPolicy(fallback_after=0)
    assert len(Supervisor(jobs, table, "run", "run", policy).act().done) == 2
    step = jobs.documents["run-serverless-standard-nc6s-v3-spot-0"]["jobs"]["serverless_standard_nc6s_v3_spot_0"]
    assert step["computeId"] == "serverless"
    assert step["resources"] == {"instance_count": 1, "instance_type": "Standard_NC6s_v3"}
    assert step["queue_settings"] == {"job_tier": "Spot"}


def test_a_single_job_that_was_lost_is_submitted_again_as_it_is(table):
    one = plan(pools=(), resources=ElasticResources(max_instance_count=2, placement="gang"))
    document = {
        "jobType": "Command",
        "displayName": "digits",
        "command": "python train.py",
        "resources": {"instanceCount": 2},
        "environmentVariables": {variables.PLAN: one.to_json()},
        "services": {"Studio": {"jobServiceType": "Studio"}, "lab": {"jobServiceType": "JupyterLab"}},
        "status": "Failed",
    }
    jobs = FakeJobs("run", document)
    jobs.status["run", "run"] = "Failed"
    assert Supervisor(jobs, table, "run", "run").act().done == ("submitted run-job-1: a node was lost",)
    made = jobs.documents["run-job-1"]
    assert made["environmentVariables"][variables.RUN_ID] == "run"
    assert made["services"] == {"lab": {"jobServiceType": "JupyterLab"}}
    assert (made["command"], made["resources"], made["displayName"]) == (
        "python train.py",
        {"instanceCount": 2},
        "digits again 1",
    )
    jobs.status["run-job-1", "run-job-1"] = "Running"
    assert Supervisor(jobs, table, "run", "run").act().done == ()


def test_steps_that_azure_ml_has_not_made_yet_are_not_asked_for_again(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    jobs.status = {}
    assert Supervisor(jobs, table, "run", "run").act().done == ()


@pytest.mark.parametrize("ended", [{"state": "succeeded"}, {"state": "failed", "message": "no", "exit_code": 3}])
def test_nothing_is_asked_for_when_the_run_has_ended_and_what_waits_is_let_go(table, ended):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    jobs.status["run", "spot_0"] = "Completed"
    close(table, **ended)
    outlook = Supervisor(jobs, table, "run", "run").act()
    assert (outlook.over, outlook.succeeded) == ("ended", ended["state"] == "succeeded")
    assert jobs.nodes() == {"spot_0": "Completed", "spot_1": "Canceled"}
    assert jobs.submissions == []


def test_a_run_that_its_owner_has_cancelled_loses_all_its_nodes(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    jobs.status["run", "spot_0"] = "Failed"
    jobs.status["run", "spot_1"] = "Running"
    Supervisor(jobs, table, "run", "run").act()
    jobs.status["run-spot-2", "spot_2"] = "Running"
    jobs.status["run", "spot_0"] = jobs.status["run", "spot_1"] = "Canceled"
    assert Supervisor(jobs, table, "run", "run").act().over == "cancelled"
    assert jobs.nodes()["spot_2"] == "Canceled"


def test_a_job_that_is_not_ours_is_refused(table):
    jobs = FakeJobs("run", {"jobType": "Pipeline", "jobs": {"a": {"environment_variables": {}}}})
    with pytest.raises(PlanError, match="no elastic job"):
        Supervisor(jobs, table, "run", "run").act()
    with pytest.raises(PlanError, match="no job 'other'"):
        Supervisor(jobs, table, "other", "other").act()


@pytest.mark.parametrize("seed", range(40))
def test_supervisors_that_die_anywhere_leave_each_node_asked_for_once(table, seed):
    """Nodes are lost and come, supervisors die before and after each effect: in the end all places are taken once."""
    draw = random.Random(seed)
    dying = True

    def trouble(where):
        if dying and draw.random() < 0.15:
            raise Broke(where) if draw.random() < 0.7 else WorkspaceUnavailable(where)

    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None), trouble)
    supervisors = [Supervisor(jobs, table, "run", "run") for _ in range(3)]
    for _ in range(60):
        number = draw.randrange(3)
        try:
            supervisors[number].act()
        except Broke:
            supervisors[number] = Supervisor(jobs, table, "run", "run")
        except WorkspaceUnavailable:
            pass
        jobs.nodes()
        if draw.random() < 0.5:
            key = draw.choice(list(jobs.status))
            if jobs.status[key] in ("Queued", "Running"):
                jobs.status[key] = draw.choice(["Running", "Failed"])
    dying = False
    for _ in range(3):
        supervisors[0].act()
        jobs.status = {key: "Running" if status == "Queued" else status for key, status in jobs.status.items()}
    assert sum(status == "Running" for status in jobs.nodes().values()) == 2
    # Each claim has its job, and no job is there without one.
    claims = {row.key.removeprefix("job.") for row in table.query("job.")}
    assert claims == set(jobs.submissions)
