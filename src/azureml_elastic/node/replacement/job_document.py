"""Documents of replacement jobs, derived from the document of the run's first job.

A run is a pipeline whose steps are its nodes, and a replacement job a pipeline of one such step. A run that is a single
job is submitted again; with the placement ``service`` as a job of one node. Two environment variables name the run.

Azure ML returns a job with additions of its own: an output, properties, tags, services and their states, and empty
fields. A replacement job has what was submitted, by the names that the plan holds.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import unquote

from pydantic import TypeAdapter

from azureml_elastic.config.plan import Plan
from azureml_elastic.config.resources import NodePool, step_names
from azureml_elastic.environment import names as variables
from azureml_elastic.errors import PlanError

SINGLE = "job"
"""Stem of the node names of a run that is a single job."""

_COPIED = ("jobType", "experimentName", "description", "computeId", "settings", "inputs")
_COPIED_OF_SINGLE = (
    *("command", "codeId", "environmentId", "componentId", "distribution", "limits", "identity", "queueSettings"),
    "parentJobName",
)
_COPIED_OF_STEP = (
    *("type", "_source", "componentId", "computeId", "distribution", "limits", "identity", "queue_settings"),
    *("resources", "inputs", "environment_variables"),
)
_OF_SERVICE = frozenset({"nodes", "port", "properties", "type"})
"""Fields of a service that are submitted, beside its kind; Azure ML adds its address and its state."""

_OF_RESOURCES = {
    "docker_args": ("dockerArgs", "dockerArgsList"),
    "instance_type": ("instanceType",),
    "locations": ("locations",),
    "properties": ("properties",),
    "shm_size": ("shmSize",),
}
_PIPELINE_OUTPUT = re.compile(r"\$\{\{\s*parent\.outputs\.(\w+)\s*\}\}", re.ASCII)
_OF_OUTPUT = {
    "jobOutputType": "job_output_type",
    "mode": "mode",
    "uri": "uri",
    "assetName": "name",
    "assetVersion": "version",
}
"""Fields of an output of a pipeline, and their names in a step."""

_COUNTS = ("instanceCount", "maxInstanceCount")

_BUILT_IN = frozenset({"studio", "tracking"})
_TENSOR_BOARD = frozenset({"tensorboard", "tensor_board"})
_OUR_OUTPUTS = "azureml_elastic_"
_PROPERTIES_OF_CLIENT = ("azureml.git.", "mlflow.source.git.")
"""Properties in which azure-ai-ml records the commit of the code."""

_TAGS_OF_SERVICE = ("_aml_system_", "azureml.", "mlflow.")
_RUN = "azureml_elastic.run"
"""Property of replacement jobs with the name of the first job."""


@dataclass(frozen=True)
class NodeSlot:
    """Slot of a node in the run: index of its pool, and number of its job within the pool."""

    pool: int
    number: int


def plan_of(document: Mapping[str, Any]) -> Plan:
    """Return the plan of a submitted job, given the properties of its document.

    Raises:
        PlanError: the job is not an elastic job, or is one of another release.
    """
    text = variable_of(document, variables.PLAN)
    if text is None:
        raise PlanError(
            "The job has no plan of azureml-elastic among its environment variables, so it is no elastic job. Name the "
            "job that submitting an ElasticCommandJob returned."
        )
    return Plan.from_json(text)


def variable_of(document: Mapping[str, Any], name: str) -> str | None:
    """Return an environment variable of a job's nodes, ``None`` if no step of the job has it."""
    return next((value for step in _steps(document).values() if (value := _variables(step).get(name))), None)


def timeout_of(document: Mapping[str, Any]) -> float:
    """Return the seconds after which Azure ML cancels a node's job; infinite if there is no limit."""
    limits = [job.get("limits") or {} for job in (document, *_steps(document).values())]
    text = next((limit["timeout"] for limit in limits if limit.get("timeout")), None)
    return math.inf if text is None else TypeAdapter(timedelta).validate_python(text).total_seconds()


def slot_of(name: str, plan: Plan) -> NodeSlot | None:
    """Return the slot of a step such as ``spot_3``, ``None`` for a step that is not a node."""
    stem, _, number = name.rpartition("_")
    stems = step_names(plan.pools)
    return NodeSlot(stems.index(stem), int(number)) if stem in stems and number.isdecimal() else None


def grows_by_service(plan: Plan) -> bool:
    """Return whether the run is a single job that Azure ML may start with fewer nodes than its maximum."""
    resources = plan.resources
    return resources.effective_placement == "service" and resources.max_instance_count > resources.min_instance_count


def replacement_job(
    document: Mapping[str, Any], plan: Plan, slot: NodeSlot, *, first: str, run_id: str, workspace: str
) -> dict[str, Any]:
    """Return the properties of the job that brings a node.

    Args:
        document: properties of the run's first job, not modified.
        first: name of the first job.
        workspace: workspace id, for the compute targets of the pools.

    Raises:
        PlanError: no step of the job is a node.
    """
    own = {variables.RUN_ID: run_id, variables.FIRST_JOB: first}
    title = document.get("displayName") or first
    single = document.get("jobType") != "Pipeline"
    job = {
        **_copied(document, (*_COPIED, *_COPIED_OF_SINGLE) if single else _COPIED),
        "properties": {**_properties(document, plan), _RUN: first},
    }
    if tags := _tags(document, plan):
        job["tags"] = tags
    if single:
        job["displayName"] = f"{title} again {slot.number}"
        job["environmentVariables"] = {**_variables(document), **own}
        job["resources"] = _resources(document, plan)
        job |= _outputs(document, plan) | _services(document, plan, _BUILT_IN)
        return _one_node(job, f"{title}, node {slot.number}") if grows_by_service(plan) else job
    name = f"{step_names(plan.pools)[slot.pool]}_{slot.number}"
    step = _step(document, plan, slot.pool, workspace)
    step |= {"display_name": name, "environment_variables": {**_variables(step), **own}}
    return {**job, "displayName": f"{title}, {name}", "jobs": {name: step}}


def _one_node(job: Mapping[str, Any], title: str) -> dict[str, Any]:
    """Return a single job with one node, as ``ElasticCommandJob`` submits it."""
    resources = {name: value for name, value in job["resources"].items() if name not in _COUNTS}
    one = {name: value for name, value in job.items() if name != "distribution"}
    for name, service in (one.get("services") or {}).items():
        one["services"][name] = {field: value for field, value in service.items() if field != "nodes"}
    return {**one, "displayName": title, "resources": {"instanceCount": 1, **resources}}


def _step(document: Mapping[str, Any], plan: Plan, pool: int, workspace: str) -> dict[str, Any]:
    """Return a copy of a step of the pool, else of another pool's step, moved to the pool's compute."""
    ours = {name: slot_of(name, plan) for name in _steps(document)}
    of_pool = [name for name, slot in ours.items() if slot is not None and slot.pool == pool]
    names = of_pool or [name for name, slot in ours.items() if slot is not None]
    if not names:
        raise PlanError("No step of the job is a node of azureml-elastic, so no replacement can be derived from it.")
    held = _steps(document)[names[-1]]
    held = {**held, "outputs": _unbound(held.get("outputs") or {}, document.get("outputs") or {})}
    step = _copied(held, _COPIED_OF_STEP) | _outputs(held, plan) | _services(held, plan, _BUILT_IN | _TENSOR_BOARD)
    if resources := _with_properties(step.pop("resources", {}), plan):
        step["resources"] = resources
    step["environment_variables"] = {
        name: text for name, text in _variables(step).items() if name != variables.FIRST_NODE
    }
    if not of_pool:
        _move(step, plan.pools[pool], workspace)
    return step


def _unbound(outputs: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the outputs of a step, with those of the pipeline in place of the outputs that are bound to them."""
    found: dict[str, Any] = {}
    for name, output in outputs.items():
        bound = _PIPELINE_OUTPUT.fullmatch(str((output or {}).get("value")))
        given = _filled(above.get(bound[1]) or {}) if bound else None
        found[name] = (
            output if given is None else {ours: given[theirs] for theirs, ours in _OF_OUTPUT.items() if theirs in given}
        )
    return found


def _move(step: dict[str, Any], pool: NodePool, workspace: str) -> None:
    """Move a step to the compute of another pool."""
    step["computeId"] = f"{unquote(workspace)}/computes/{pool.compute}"  # as azure-ai-ml writes it, serverless as well
    step["resources"] = {
        **{name: value for name, value in (step.get("resources") or {}).items() if name != "instance_type"},
        **({"instance_type": pool.instance_type} if pool.instance_type else {}),
    }
    queue = {name: value for name, value in (step.pop("queue_settings", None) or {}).items() if name == "priority"}
    if pool.job_tier is not None:
        step["queue_settings"] = {**queue, "job_tier": pool.job_tier}


def _copied(held: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return copies of the fields that are not empty, without the empty fields in them."""
    found = {name: held[name] for name in names if held.get(name)}
    return {name: copy.deepcopy(_filled(value)) for name, value in found.items()}


def _filled(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {name: _filled(each) for name, each in value.items() if each is not None}


def _resources(document: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the submitted resources of a single job; Azure ML adds defaults such as a size of ``/dev/shm``."""
    submitted = (field for name in plan.submitted.resources for field in _OF_RESOURCES.get(name, ()))
    return _with_properties(_copied(document.get("resources") or {}, (*_COUNTS, *submitted)), plan)


def _with_properties(resources: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return resources with the submitted properties in place of those that Azure ML returns."""
    others = {name: value for name, value in resources.items() if name != "properties"}
    given = plan.resources.properties
    return {**others, "properties": copy.deepcopy(_filled(given))} if given else others


def _properties(document: Mapping[str, Any], plan: Plan) -> dict[str, str]:
    return {
        name: value
        for name, value in _strings(document.get("properties")).items()
        if name in plan.submitted.properties or name.startswith(_PROPERTIES_OF_CLIENT)
    }


def _tags(document: Mapping[str, Any], plan: Plan) -> dict[str, str]:
    """Return the tags but those of the service; tags may have been given to ``create_or_update``, beside the plan."""
    return {
        name: value
        for name, value in _strings(document.get("tags")).items()
        if name in plan.submitted.tags or not name.startswith(_TAGS_OF_SERVICE)
    }


def _outputs(held: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return the submitted outputs of a job or step; one that was given no path has none again."""
    outputs = {}
    for name, value in (held.get("outputs") or {}).items():
        output = _filled(value or {})
        if name in plan.submitted.own_outputs:
            outputs[name] = {field: each for field, each in output.items() if field != "uri"}
        elif name in plan.submitted.outputs or name.startswith(_OUR_OUTPUTS):
            outputs[name] = output
    return {"outputs": copy.deepcopy(outputs)} if outputs else {}


def _services(held: Mapping[str, Any], plan: Plan, left_out: frozenset[str]) -> dict[str, Any]:
    """Return the submitted services that are not of the kinds that are left out, without their addresses and states."""
    services = {}
    for name, service in (held.get("services") or {}).items():
        kinds = {field: service[field] for field in ("jobServiceType", "job_service_type") if service.get(field)}
        if name in plan.submitted.services and not {str(kind).lower() for kind in kinds.values()} & left_out:
            given = {field: each for field, each in _filled(service).items() if field in _OF_SERVICE}
            services[name] = kinds | given
    return {"services": copy.deepcopy(services)} if services else {}


def _steps(document: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
    """Return the steps of a pipeline by name, or a single job as its only step."""
    return {SINGLE: document} if document.get("jobType") != "Pipeline" else document.get("jobs") or {}


def _variables(step: Mapping[str, Any]) -> dict[str, str]:
    return _strings(step.get("environment_variables") or step.get("environmentVariables"))


def _strings(values: Any) -> dict[str, str]:
    """Return the values as strings; Azure ML also has values of other types."""
    return {
        str(name): value if isinstance(value, str) else json.dumps(value) for name, value in dict(values or {}).items()
    }
