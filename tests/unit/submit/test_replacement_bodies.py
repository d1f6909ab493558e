"""Jobs that replace nodes: what was submitted, and nothing that Azure ML has added to it since."""

import copy

import pytest
from azure.ai.ml import Output
from azure.ai.ml.entities import JupyterLabJobService

from azureml_elastic.config import ElasticDistribution, ElasticResources, NodePool
from azureml_elastic.environment import names as variables
from azureml_elastic.node.replacement.job_document import NodeSlot, plan_of, replacement_job
from azureml_elastic.testing.api.history import job_properties
from azureml_elastic.testing.jobs.body import read_job
from azureml_elastic.testing.jobs.runs import Run
from tests.unit.submit.jobs import small_job

WORKSPACE = "<workspace>"


def make(**fields):
    return small_job(
        **{
            "inputs": {"lr": 0.1},
            "outputs": {"model": Output(type="uri_folder"), "kept": Output(path="azureml://datastores/d/paths/k/")},
            "environment_variables": {"A": "1"},
            "resources": ElasticResources(max_instance_count=2, docker_args=("--ipc", "host"), shm_size="8g"),
            "distribution": ElasticDistribution(process_count_per_instance=4),
            "services": {"lab": JupyterLabJobService()},
            "display_name": "digits",
            "tags": {"team": "a", "mlflow.note.content": "mine"},
            "properties": {"p": "1", "azureml.mine": "2"},
            "timeout": 3600,
            **fields,
        }
    )


@pytest.fixture
def replaced(client, sent, components):
    """Submit a job, and return its body and that of the job for a node, derived from what Azure ML returns."""

    def replaced(job, slot):
        client.jobs.create_or_update(job)
        (body,) = sent()
        properties = body["properties"]
        kind = properties["jobType"]
        run = Run("first", kind, "digits", "elastic", properties)
        if kind == "Command":
            outputs = read_job(properties, lambda _: components()[0]).outputs
            run.outputs = {name: (out.type, out.uri or f"azureml://chosen/{name}/") for name, out in outputs.items()}
        else:
            chosen = {name: out.get("uri", f"azureml://chosen/{name}/") for name, out in properties["outputs"].items()}
            run.outputs = {name: (properties["outputs"][name]["jobOutputType"], uri) for name, uri in chosen.items()}
        returned = job_properties(run, "Running", workspace="/w", version="2025-01-01-preview")
        returned["tags"] = {**returned["tags"], "_aml_system_ComputeTargetStatus": "{}"}
        assert returned["properties"] != properties["properties"]
        assert "Studio" in returned["services"]
        made = replacement_job(returned, plan_of(returned), slot, first="first", run_id="run", workspace=WORKSPACE)
        return properties, made

    return replaced


def test_a_single_job_is_sent_again_with_nothing_but_what_was_submitted(replaced):
    resources = ElasticResources(max_instance_count=2, placement="gang", docker_args=("--ipc", "host"))
    body, made = replaced(make(resources=resources, parent_job_name="above"), NodeSlot(0, 1))
    assert body["parentJobName"] == "above"
    assert body["resources"]["dockerArgsList"] == ["--ipc", "host"]
    own = {variables.RUN_ID: "run", variables.FIRST_JOB: "first"}
    body["environmentVariables"] |= own
    body["properties"]["azureml_elastic.run"] = "first"
    body["displayName"] = "digits again 1"
    del body["isArchived"], body["resources"]["properties"]
    for output in body["outputs"].values():
        output.setdefault("mode", "ReadWriteMount")  # the default, which Azure ML returns by name
    assert made == body


def test_a_node_is_sent_again_with_nothing_but_what_was_submitted(replaced):
    body, made = replaced(make(), NodeSlot(0, 2))
    step = body["jobs"]["node_1"]
    step["environment_variables"] |= {variables.RUN_ID: "run", variables.FIRST_JOB: "first"}
    assert step["resources"]["docker_args_list"] == ["--ipc", "host"]
    body["properties"]["azureml_elastic.run"] = "first"
    del body["isArchived"], body["outputs"]
    assert made == {**body, "displayName": "digits, node_2", "jobs": {"node_2": {**step, "display_name": "node_2"}}}


def test_a_node_of_serverless_compute_names_it_as_the_first_submission_does(client, sent, replaced):
    serverless = NodePool("serverless", max_instance_count=1, instance_type="Standard_NC6s_v3", job_tier="Spot")
    cluster = NodePool("gpu", max_instance_count=1)
    fields = {"services": None, "resources": ElasticResources(max_instance_count=1)}
    _, made = replaced(make(compute=[cluster, serverless], **fields), NodeSlot(1, 0))
    client.jobs.create_or_update(make(compute=[serverless], **fields))
    ((name, step),) = sent()[1]["properties"]["jobs"].items()
    moved = made["jobs"]["serverless_standard_nc6s_v3_spot_0"]
    assert step["computeId"] == f"{WORKSPACE}/computes/serverless"
    for plan in (moved, step):
        del plan["environment_variables"], plan["outputs"]
    assert moved == {**step, "display_name": "serverless_standard_nc6s_v3_spot_0"}
    assert name == "serverless_standard_nc6s_v3_spot_0"


@pytest.mark.parametrize("placement", ["fan_out", "service", "gang"])
@pytest.mark.parametrize("given", [None, {"AISuperComputer": {"slaTier": "Basic", "tries": [1, 2], "zone": None}}])
def test_the_properties_of_the_resources_are_those_that_were_submitted(client, sent, placement, given):
    """Azure ML returns them with defaults of its own, also within those that were given."""
    resources = ElasticResources(max_instance_count=2, placement=placement, properties=given)
    client.jobs.create_or_update(make(resources=resources))
    (body,) = sent()
    returned = copy.deepcopy(body["properties"])
    submitted = []
    for holder in returned["jobs"].values() if placement == "fan_out" else [returned]:
        submitted.append(copy.deepcopy(holder["resources"].get("properties") or None))
        added = {"slaTier": "Basic", "tries": [1, 2], "scalePolicy": {"min": 1}, "imageVersion": None}
        holder["resources"]["properties"] = {"AISuperComputer": added, "ComputeSpecification": {"Automatic": True}}
    slot = NodeSlot(0, 2)
    made = replacement_job(returned, plan_of(returned), slot, first="first", run_id="run", workspace=WORKSPACE)
    step = made["jobs"]["node_2"] if placement == "fan_out" else made
    assert step["resources"].get("properties") == submitted[0]
    assert submitted[0] == (given and {"AISuperComputer": {"slaTier": "Basic", "tries": [1, 2]}})


@pytest.mark.parametrize("given", [None, {}])
def test_empty_fields_of_the_returned_document_are_not_sent(replaced, given):
    _, made = replaced(
        make(services=given, resources=ElasticResources(max_instance_count=1), identity=None, timeout=None),
        NodeSlot(0, 1),
    )
    assert "services" not in made
    assert "limits" not in made
    assert None not in made.values()


def test_the_only_node_is_sent_again_with_outputs_of_its_own(replaced):
    """Those of the first node are the outputs of the pipeline, which a pipeline of one other node does not have."""
    outputs = {
        "model": Output(type="uri_folder", mode="upload"),
        "kept": Output(type="uri_folder", path="azureml://datastores/d/paths/k/", name="asset"),
    }
    resources = ElasticResources(max_instance_count=1, placement="fan_out")
    body, made = replaced(make(outputs=outputs, resources=resources), NodeSlot(0, 1))
    assert body["jobs"]["node_0"]["outputs"]["model"]["value"] == "${{parent.outputs.model}}"
    sent = made["jobs"]["node_1"]["outputs"]
    assert sent["model"] == {"job_output_type": "uri_folder", "mode": "Upload"}
    assert sent["kept"].items() >= {"uri": "azureml://datastores/d/paths/k/", "name": "asset"}.items()
    assert "outputs" not in made


def test_a_node_in_place_of_the_first_one_does_not_write_the_outputs_of_the_run(replaced):
    pools = [NodePool("other", max_instance_count=1), NodePool("gpu", max_instance_count=1)]
    body, made = replaced(make(compute=pools, resources=None), NodeSlot(0, 1))
    assert "AZUREML_ELASTIC_FIRST_NODE" in body["jobs"]["other_0"]["environment_variables"]
    assert "AZUREML_ELASTIC_FIRST_NODE" not in made["jobs"]["other_1"]["environment_variables"]
