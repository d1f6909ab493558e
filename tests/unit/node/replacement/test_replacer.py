"""Concurrent replacers of one run that fail at any call."""

import random
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from azureml_elastic.config import ElasticResources, NodePool, Plan, ReplacementPolicy
from azureml_elastic.config.plan import SubmittedNames
from azureml_elastic.environment import names as variables
from azureml_elastic.errors import JobRefused, PlanError, WorkspaceUnavailable
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY
from azureml_elastic.node.replacement.jobs import RunRecord
from azureml_elastic.node.replacement.replacer import NodeReplacer

POOLS = (NodePool("spot", max_instance_count=2), NodePool("sure", max_instance_count=2))
WORKSPACE = "/subscriptions/s/resourceGroups/g/providers/Microsoft.MachineLearningServices/workspaces/w"


FINAL = ("Completed", "Failed", "Canceled")


class Broke(Exception):
    """The process of the replacer ends here."""


class FakeJobs:
    """Pipelines of steps, with a clock; ``trouble`` is asked before and after each effect, ``hook`` at each reading."""

    workspace = WORKSPACE

    def __init__(self, first, document, trouble=lambda _: None):
        self.now = datetime(2026, 11, 22, tzinfo=timezone.utc)
        self.trouble = trouble
        self.hook = lambda *_: None
        self.documents = {}
        self.own = {}
        self.steps = {}
        self.submissions = []
        self.cancellations = []
        self.refused = set()
        self._begin(first, document)

    def _begin(self, name, document):
        self.documents[name] = document
        self.own[name] = RunRecord(name, "", "Running", self.now, self.now)
        for step in document.get("jobs") or {}:
            self.steps[name, step] = RunRecord(f"{name}/{step}", step, "Queued", self.now)

    def pass_(self, **time):
        self.now += timedelta(**time)

    def set(self, job, step, status):
        """Change the state of a step; of a single job without one."""
        held, key = (self.own, job) if step is None else (self.steps, (job, step))
        record = replace(held[key], status=status)
        if status == "Running" and record.started is None:
            record = replace(record, started=self.now)
        held[key] = replace(record, ended=self.now) if status in FINAL else record

    def document(self, name):
        self.trouble("document")
        return self.documents.get(name)

    def submit(self, name, properties):
        self.trouble("before")
        if name in self.refused:
            raise JobRefused(f"no {name}")
        if name in self.documents:
            return False
        self.submissions.append(name)
        self._begin(name, properties)
        self.trouble("after")
        return True

    def cancel(self, name):
        self.trouble("before")
        self.cancellations.append(name)
        if name in self.own and self.own[name].status not in FINAL:
            self.set(name, None, "Canceled")
        for job, step in self.steps:
            if name in (job, f"{job}/{step}") and self.steps[job, step].status not in FINAL:
                self.set(job, step, "Canceled")
        self.trouble("after")

    def record(self, name):
        self.trouble("record")
        self.hook("record", name)
        return self.own.get(name)

    def children(self, name):
        self.trouble("children")
        self.hook("children", name)
        return [record for (job, _), record in self.steps.items() if job == name]

    def nodes(self):
        """Return the steps' states by their names; each name is there once."""
        names = [step for _, step in self.steps]
        assert len(names) == len(set(names)), names
        return {step: record.status for (_, step), record in self.steps.items()}


def plan(**fields):
    return Plan(
        **{
            "resources": ElasticResources(max_instance_count=2),
            "pools": POOLS,
            "submitted": SubmittedNames(services=("lab", "ssh", "tb")),
            "replacement": ReplacementPolicy(retry_after=1, max_replacements=1000),
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


def close(table, **fields):
    table.insert(ROUND_KEY, Round(**fields).to_value())


def test_what_brings_a_node_is_the_first_job_with_that_node_alone(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    jobs.set("run", "spot_0", "Running")
    lose(jobs, "run", "spot_1")
    status = NodeReplacer(jobs, table, "run", "run").act()
    assert status.done == ("submitted run-spot-2: a node was lost",)
    ((name, step),) = jobs.documents["run-spot-2"]["jobs"].items()
    assert name == step["display_name"] == "spot_2"
    assert step["environment_variables"].items() >= {variables.RUN_ID: "run", variables.FIRST_JOB: "run"}.items()
    assert NodeReplacer(jobs, table, "run", "run").act().done == ()


def test_a_node_of_a_pool_that_has_none_yet_is_put_onto_its_compute(table):
    sure = NodePool("serverless", max_instance_count=2, instance_type="Standard_NC6s_v3", job_tier="Spot")
    jobs = FakeJobs("run", pipeline(plan(pools=(POOLS[0], sure)), spot_0=None, spot_1=None))
    policy = ReplacementPolicy(fallback_after=0)
    assert len(NodeReplacer(jobs, table, "run", "run", policy).act().done) == 2
    step = jobs.documents["run-serverless-standard-nc6s-v3-spot-0"]["jobs"]["serverless_standard_nc6s_v3_spot_0"]
    assert step["computeId"] == f"{WORKSPACE}/computes/serverless"
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
    jobs.pass_(hours=1)
    jobs.set("run", None, "Failed")
    assert NodeReplacer(jobs, table, "run", "run").act().done == ("submitted run-job-1: a node was lost",)
    jobs.set("run-job-1", None, "Running")
    assert NodeReplacer(jobs, table, "run", "run").act().done == ()


def service_job(least, most):
    resources = ElasticResources(min_instance_count=least, max_instance_count=most, placement="service")
    return {
        "jobType": "Command",
        "displayName": "digits",
        "command": "python train.py",
        "distribution": {"distributionType": "PyTorch", "processCountPerInstance": 1},
        "resources": {"instanceCount": least, "maxInstanceCount": most, "shmSize": "2g"},
        "environmentVariables": {variables.PLAN: plan(pools=(), resources=resources).to_json()},
        "services": {"lab": {"jobServiceType": "JupyterLab", "nodes": {"nodesValueType": "All"}}},
    }


def seal(table, count):
    members = tuple(Member(node=f"node{number}", incarnation="i") for number in range(count))
    value = Round(number=1, state="sealed", members=members).to_value()
    row = table.get(ROUND_KEY)
    if row is None:
        table.insert(ROUND_KEY, value)
    else:
        table.replace(ROUND_KEY, value, row.etag)


def test_nodes_that_the_service_does_not_start_are_requested_as_jobs_of_their_own(table):
    jobs = FakeJobs("run", service_job(2, 4))
    replacer = replacer_of(jobs, table, fallback_after=600)
    assert replacer.act().done == ()
    jobs.set("run", None, "Running")
    seal(table, 2)
    jobs.pass_(seconds=590)
    assert replacer.act().done == ()
    jobs.pass_(seconds=20)
    replacer.act()
    assert jobs.submissions == ["run-job-4", "run-job-5"]
    made = jobs.documents["run-job-4"]
    assert made["resources"] == {"instanceCount": 1}
    assert "distribution" not in made
    assert made["services"] == {"lab": {"jobServiceType": "JupyterLab"}}
    assert made["environmentVariables"][variables.FIRST_JOB] == "run"
    for name in jobs.submissions:
        jobs.set(name, None, "Running")
    seal(table, 4)
    jobs.pass_(hours=1)
    assert replacer.act().done == NodeReplacer(jobs, table, "run", "run").act().done == ()
    jobs.set("run-job-5", None, "Failed")
    seal(table, 3)
    assert len(replacer.act().done) == 1
    assert jobs.submissions[-1] == "run-job-6"


def test_nodes_that_the_service_starts_are_not_requested_again(table):
    jobs = FakeJobs("run", service_job(2, 4))
    replacer = replacer_of(jobs, table, fallback_after=600)
    jobs.set("run", None, "Running")
    seal(table, 3)
    jobs.pass_(hours=1)
    replacer.act()
    assert jobs.submissions == ["run-job-4"]
    jobs.set("run-job-4", None, "Queued")
    seal(table, 4)  # the service has started its last node after all
    replacer.act()
    assert jobs.cancellations == ["run-job-4"]
    jobs.set("run", None, "Canceled")
    assert replacer.act().over == "cancelled"


@pytest.mark.parametrize("ended", [{"state": "succeeded"}, {"state": "failed", "message": "no", "exit_code": 3}])
def test_nothing_is_asked_for_when_the_run_has_ended_and_what_waits_is_let_go(table, ended):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    jobs.set("run", "spot_0", "Completed")
    close(table, **ended)
    status = NodeReplacer(jobs, table, "run", "run").act()
    assert (status.over, status.succeeded) == ("ended", ended["state"] == "succeeded")
    assert jobs.nodes() == {"spot_0": "Completed", "spot_1": "Canceled"}
    assert jobs.submissions == []


def test_a_run_that_its_owner_has_cancelled_loses_all_its_nodes(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    jobs.set("run", "spot_1", "Running")
    lose(jobs, "run", "spot_0")
    NodeReplacer(jobs, table, "run", "run").act()
    jobs.set("run-spot-2", "spot_2", "Running")
    jobs.set("run", "spot_0", "Canceled")
    jobs.set("run", "spot_1", "Canceled")
    assert NodeReplacer(jobs, table, "run", "run").act().over == "cancelled"
    assert jobs.nodes()["spot_2"] == "Canceled"


def test_a_job_that_is_not_ours_is_refused(table):
    jobs = FakeJobs("run", {"jobType": "Pipeline", "jobs": {"a": {"environment_variables": {}}}})
    with pytest.raises(PlanError, match="no elastic job"):
        NodeReplacer(jobs, table, "run", "run").act()
    with pytest.raises(PlanError, match="no job 'other'"):
        NodeReplacer(jobs, table, "other", "other").act()


@pytest.mark.parametrize("seed", range(40))
def test_replacers_that_die_at_any_call_fill_each_slot_once(table, seed):
    """Nodes are lost and arrive, replacers die before and after each effect; finally each slot is filled once."""
    draw = random.Random(seed)
    dying = True

    def trouble(where):
        if dying and draw.random() < 0.15:
            raise Broke(where) if draw.random() < 0.7 else WorkspaceUnavailable(where)

    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None), trouble)
    replacers = [NodeReplacer(jobs, table, "run", "run") for _ in range(3)]
    for _ in range(60):
        number = draw.randrange(3)
        try:
            replacers[number].act()
        except Broke:
            replacers[number] = NodeReplacer(jobs, table, "run", "run")
        except WorkspaceUnavailable:
            pass
        jobs.nodes()
        jobs.pass_(minutes=draw.choice([0, 1, 5]))
        if draw.random() < 0.5:
            job, step = draw.choice(list(jobs.steps))
            if jobs.steps[job, step].status in ("Queued", "Running"):
                jobs.set(job, step, draw.choice(["Running", "Failed"]))
    dying = False
    for _ in range(6):
        jobs.pass_(hours=2)
        replacers[0].act()
        for job, step in list(jobs.steps):
            if jobs.steps[job, step].status == "Queued":
                jobs.set(job, step, "Running")
    assert sum(status == "Running" for status in jobs.nodes().values()) == 2
    # No job is there without a claim.
    claims = {row.key.removeprefix("job.") for row in table.query("job.")}
    assert claims >= set(jobs.submissions)


def replacer_of(jobs, table, **policy):
    return NodeReplacer(jobs, table, "run", "run", ReplacementPolicy(**policy) if policy else None)


def lose(jobs, job, step):
    jobs.set(job, step, "Running")
    jobs.pass_(hours=1)
    jobs.set(job, step, "Failed")


def test_a_pool_whose_node_ended_early_is_asked_again_by_the_same_replacer(table):
    jobs = FakeJobs("run", pipeline(plan(pools=(), resources=ElasticResources(max_instance_count=2)), node_0=None))
    replacer = replacer_of(jobs, table, retry_after=60)
    jobs.set("run", "node_0", "Running")
    assert replacer.act().done == ("submitted run-node-1: a node was lost",)
    jobs.set("run-node-1", "node_1", "Running")
    jobs.pass_(seconds=30)
    jobs.set("run-node-1", "node_1", "Failed")
    jobs.pass_(seconds=5)
    assert replacer.act().done == ()
    jobs.pass_(seconds=55)
    assert replacer.act().done == ("submitted run-node-2: a node was lost",)


def test_a_job_that_azure_ml_refuses_keeps_nothing_else_from_being_done(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    replacer = replacer_of(jobs, table, retry_after=60, fallback_after=300)
    jobs.refused = {f"run-spot-{number}" for number in range(50)}
    jobs.set("run", "spot_1", "Running")
    lose(jobs, "run", "spot_0")
    assert "no run-spot-2" in replacer.act().done
    for _ in range(20):
        jobs.pass_(minutes=10)
        replacer.act()
    assert "run-sure-0" in jobs.submissions
    table.insert(ROUND_KEY, Round(state="succeeded").to_value())
    assert replacer.act().over == "ended"


@pytest.mark.parametrize("over", ["ended", "cancelled", "budget"])
def test_an_open_claim_is_not_completed_when_the_node_is_not_needed(table, over):
    pools = (NodePool("spot", max_instance_count=2, price_per_hour=1.0),)
    jobs = FakeJobs("run", pipeline(plan(pools=pools), spot_0=None, spot_1=None))
    jobs.set("run", "spot_1", "Running")
    lose(jobs, "run", "spot_0")
    table.insert("job.run-spot-2", {"first": "run", "stem": "spot", "number": 2})
    if over == "ended":
        close(table, state="succeeded")
    elif over == "cancelled":
        jobs.set("run", None, "Canceled")
    replacer_of(jobs, table, **({"budget": 0.5} if over == "budget" else {})).act()
    assert jobs.submissions == []
    assert "" not in jobs.cancellations
    if over == "budget":
        assert replacer_of(jobs, table).act().done == ("submitted run-spot-2: a node was lost",)


def test_a_cancellation_by_a_replacer_does_not_look_like_the_owners(table):
    jobs = FakeJobs("run", pipeline(plan(resources=ElasticResources(max_instance_count=1)), spot_0=None))
    jobs.set("run", "spot_0", "Running")
    table.insert("job.run-sure-0", {"first": "run", "stem": "sure", "number": 0})
    jobs.submit("run-sure-0", {"jobs": {"sure_0": {}}})
    jobs.set("run-sure-0", "sure_0", "Running")
    other = replacer_of(jobs, table)

    def while_reading(*_):
        jobs.hook = lambda *_: None
        other.act()

    jobs.hook = while_reading
    assert replacer_of(jobs, table).act().over is None
    assert jobs.nodes() == {"spot_0": "Running", "sure_0": "Canceled"}


def test_a_cancellation_that_was_lost_is_repeated(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None, sure_0=None))
    for step in ("spot_0", "spot_1", "sure_0"):
        jobs.set("run", step, "Running")

    def away(where):
        if where == "before":
            raise WorkspaceUnavailable(where)

    jobs.trouble = away
    with pytest.raises(WorkspaceUnavailable):
        replacer_of(jobs, table).act()
    assert jobs.nodes()["sure_0"] == "Running"
    jobs.trouble = lambda _: None
    assert replacer_of(jobs, table).act().done == ("cancelled run/sure_0: its cancellation was decided before",)
    assert replacer_of(jobs, table).act().done == ()


def test_a_run_whose_table_is_gone_is_not_begun_again_when_a_node_has_ended_well(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    jobs.set("run", "spot_0", "Completed")
    jobs.set("run", "spot_1", "Failed")
    status = replacer_of(jobs, table).act()
    assert (status.over, status.succeeded) == ("ended", True)
    assert jobs.submissions == []


def test_a_job_that_is_back_in_the_queue_is_waited_for_as_before_and_costs_nothing_meanwhile(table):
    pools = (NodePool("spot", max_instance_count=1, price_per_hour=1.0), NodePool("sure", max_instance_count=1))
    jobs = FakeJobs("run", pipeline(plan(pools=pools, resources=ElasticResources(max_instance_count=1)), spot_0=None))
    jobs.set("run", "spot_0", "Running")
    jobs.pass_(hours=1)
    jobs.set("run", "spot_0", "Queued")
    replacer = replacer_of(jobs, table, fallback_after=600)
    assert replacer.act().done == ()
    jobs.pass_(seconds=600)
    status = replacer.act()
    assert status.done == ("submitted run-sure-0: nodes of spot do not start",)
    assert status.jobs[0].ran_s == 3600


def test_steps_that_azure_ml_has_not_made_are_waited_for_and_then_asked_for(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    jobs.steps.clear()
    replacer = replacer_of(jobs, table, fallback_after=600)
    assert replacer.act().done == ()
    jobs.pass_(seconds=700)
    assert replacer.act().done == (
        "submitted run-sure-0: nodes of spot do not start",
        "submitted run-sure-1: nodes of spot do not start",
    )
    jobs.set("run", None, "Failed")
    jobs.pass_(hours=1)
    assert replacer.act().over is None
    assert not [name for name in jobs.cancellations if not name.startswith("run")]


def test_a_node_that_reached_its_own_timeout_is_lost_not_unwanted(table):
    step = {"limits": {"timeout": "PT1H"}}
    jobs = FakeJobs("run", pipeline(plan(), spot_0=step, spot_1=step))
    jobs.set("run", "spot_0", "Running")
    jobs.set("run", "spot_1", "Running")
    jobs.pass_(hours=1)
    jobs.set("run", "spot_0", "Canceled")
    assert replacer_of(jobs, table).act().done == ("submitted run-spot-2: a node was lost",)


def test_a_run_without_nodes_and_replacements_is_hopeless(table):
    jobs = FakeJobs("run", pipeline(plan(), spot_0=None, spot_1=None))
    lose(jobs, "run", "spot_0")
    lose(jobs, "run", "spot_1")
    status = replacer_of(jobs, table, max_replacements=0).act()
    assert status.hopeless
    assert "limit of 0 replacements" in status.limit
    assert not replacer_of(jobs, table).act().hopeless
