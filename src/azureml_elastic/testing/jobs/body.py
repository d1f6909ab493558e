"""Submitted jobs, parsed from the documents that reach Azure ML: command jobs, pipelines and sweeps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Literal, TypeAlias, get_args

from pydantic import TypeAdapter, ValidationError

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.search_space import (
    SearchSpace,
    as_searched,
    read_binding,
    read_search_space,
    text_of,
    with_values,
)
from azureml_elastic.testing.messages import either

Mode = Literal["download", "upload", "mount", "direct"]
_MODES: tuple[Mode, ...] = get_args(Mode)

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_MOST_PROCESSES = 256
_MOST_TRIALS = 1000
_DEFAULT_DATASTORE = "workspaceblobstore"
_BOUND_FIELDS = ("inputs", "outputs")
_DURATION = TypeAdapter(timedelta)


@dataclass(frozen=True)
class Reference:
    """An output of a job that is part of the submitted one."""

    path: tuple[str, ...]
    """Names of the steps that lead to the job; empty for the submitted one."""
    name: str


@dataclass(frozen=True)
class InputBody:
    """An input: a literal, the URI of a file or folder, or the output of another step; and its delivery mode."""

    literal: str | None = None
    uri: str | None = None
    mode: Mode = "mount"
    reference: Reference | None = None


@dataclass(frozen=True)
class OutputBody:
    """An output; without a URI it gets a location of the job's own, or that of the pipeline's output that it is."""

    uri: str | None = None
    mode: Mode = "mount"
    type: str = "uri_folder"
    reference: Reference | None = None


@dataclass(frozen=True)
class CommandBody:
    """A command job, alone or as a step; expressions in the command are not expanded."""

    command: str
    code: str | None
    """Id of the code."""
    inputs: Mapping[str, InputBody]
    outputs: Mapping[str, OutputBody]
    environment_variables: Mapping[str, str]
    compute: str
    nodes: int = 1
    """Number of nodes that start together."""
    most_nodes: int = 1
    """Maximum number of nodes, more than ``nodes`` where the service itself is elastic."""
    processes: int = 1
    """Number of processes per node."""
    distributed: bool = False
    """Whether the service sets the variables of torch.distributed."""
    timeout_s: float | None = None


@dataclass(frozen=True)
class SweepBody:
    """A sweep: its trials are one command job with values of the search space."""

    trial: CommandBody
    space: SearchSpace
    most_trials: int
    most_at_once: int
    metric: str
    maximize: bool
    timeout_s: float | None = None

    @property
    def outputs(self) -> Mapping[str, OutputBody]:
        """The outputs of the best trial."""
        return self.trial.outputs


@dataclass(frozen=True)
class PipelineBody:
    """A pipeline of steps that run as soon as what they read is there."""

    steps: Mapping[str, JobBody]
    outputs: Mapping[str, OutputBody] = field(default_factory=dict)


JobBody: TypeAlias = "CommandBody | PipelineBody | SweepBody"
"""What a submitted job is."""

_Inputs: TypeAlias = Mapping[str, InputBody]
_Outputs: TypeAlias = Mapping[str, OutputBody]
_Document: TypeAlias = Mapping[str, Any]

Component = Callable[[str], _Document]
"""Function that returns the specification of a component by its id."""


@dataclass(frozen=True)
class _Pipeline:
    """A pipeline whose steps are read: where it is in the submitted job, and what its steps can be bound to."""

    path: tuple[str, ...]
    inputs: Mapping[str, InputBody]
    outputs: Mapping[str, OutputBody]
    compute: str | None
    component: Component


def read_job(properties: _Document, component: Component) -> JobBody:
    """Parse the properties of a job document.

    Raises:
        UsageError: the local workspace does not run such jobs, or the document is malformed.
    """
    try:
        return _read_job(properties, component)
    # Any client may send any document: what is malformed can fail at each line of the parser.
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(
            f"The job's document is malformed: {error!r}. Build the job with azure-ai-ml, which writes valid ones."
        ) from error


def _read_job(properties: _Document, component: Component) -> JobBody:
    kind = properties.get("jobType")
    inputs = {name: _input(value) for name, value in _named(properties, "inputs").items()}
    outputs = _bound_outputs(properties, properties, _Pipeline((), inputs, {}, None, component))
    if kind == "Command":
        return _command(properties, inputs, outputs)
    if kind == "Sweep":
        trial = {key: value for key, value in {**properties, **_mapping(properties, "trial")}.items() if value}
        return _sweep(properties, trial, inputs, outputs)
    if kind != "Pipeline":
        raise UsageError(
            f"The local workspace runs command jobs, pipelines and sweeps of them, but this job is of type {kind!r}. "
            "Submit the training as a command job."
        )
    settings = _mapping(properties, "settings")
    store = settings.get("default_datastore")
    if store is not None and str(store).rpartition("/")[2].removeprefix("azureml:") != _DEFAULT_DATASTORE:
        raise UsageError(
            f"default_datastore={store!r} is not in the local workspace. It has {_DEFAULT_DATASTORE}, where the "
            "outputs of steps are anyway."
        )
    spec = component(str(properties["componentId"])) if properties.get("componentId") else properties
    compute = properties.get("computeId") or settings.get("default_compute")
    if spec is not properties:
        # The component's inputs, with its defaults, bound to those that the job gives.
        declared = {name: {"value": f"${{{{parent.inputs.{name}}}}}"} for name in inputs}
        inputs = _bound_inputs(spec, {"inputs": declared}, _Pipeline((), inputs, {}, None, component))
    steps = _steps(spec, _Pipeline((), inputs, outputs, compute, component))
    return PipelineBody(steps, outputs)


def _steps(spec: _Document, pipeline: _Pipeline) -> dict[str, JobBody]:
    steps = {name: _step(name, node, pipeline) for name, node in _named(spec, "jobs").items()}
    if not steps:
        where = f"The pipeline {'.'.join(pipeline.path)!r}" if pipeline.path else "The pipeline"
        raise UsageError(f"{where} has no steps. Give it at least one command.")
    return steps


def _step(name: str, node: _Document, pipeline: _Pipeline) -> JobBody:
    kind = node.get("type")
    if kind not in ("command", "pipeline", "sweep"):
        raise UsageError(
            f"The step {name!r} is of type {kind!r}; the local workspace runs steps of the types 'command', 'pipeline' "
            "and 'sweep'."
        )
    called = _mapping(node, "trial") if kind == "sweep" else node
    spec = pipeline.component(str(called["componentId"]))
    inputs, outputs = _bound_inputs(spec, node, pipeline), _bound_outputs(spec, node, pipeline)
    # Inputs and outputs may be those of other steps; any other field is known before a step has run.
    literals = {name: value.literal for name, value in pipeline.inputs.items() if value.literal is not None}
    node = {key: value if key in _BOUND_FIELDS else _filled(value, literals) for key, value in node.items()}
    if kind == "pipeline":
        compute = node.get("computeId") or pipeline.compute
        inner = _Pipeline((*pipeline.path, name), inputs, outputs, compute, pipeline.component)
        return PipelineBody(_steps(spec, inner), outputs=outputs)
    step = {**spec, **{key: value for key, value in node.items() if value is not None}}
    step["environment_variables"] = {
        **_mapping(spec, "environment_variables"),
        **_mapping(node, "environment_variables"),
    }
    if kind == "sweep":
        searched = _mapping(node, "search_space")
        step["command"] = as_searched(str(step["command"]), searched)
        fixed = {each: value for each, value in inputs.items() if each not in searched}
        return _sweep(node, step, fixed, outputs, pipeline.compute)
    return _command(step, inputs, outputs, pipeline.compute)


def _filled(value: Any, literals: Mapping[str, str]) -> Any:
    """Return a setting of a step, such as its resources, with the values of the pipeline's inputs."""
    if isinstance(value, Mapping):
        return {name: _filled(each, literals) for name, each in value.items()}
    binding = read_binding(value)
    if binding is None:
        return value
    if binding["kind"] != "inputs" or binding["name"] not in literals:
        raise UsageError(
            f"The local workspace cannot set a field of a step to {value!r}, which is none of the pipeline's literal "
            f"inputs: {', '.join(sorted(literals)) or 'none'}."
        )
    return literals[binding["name"]]


def _bound_inputs(spec: _Document, node: _Document, pipeline: _Pipeline) -> dict[str, InputBody]:
    declared, given = _named(spec, "inputs"), _mapping(node, "inputs")
    bound = {}
    for name, declaration in declared.items():
        value = given.get(name)
        binding = None if value is None else read_binding(value.get("value", value.get("uri")))
        mode = None if value is None else value.get("mode") or declaration.get("mode")
        if binding is not None and binding["step"] is not None:
            source = Reference((*pipeline.path, binding["step"]), binding["name"])
            bound[name] = InputBody(mode=_mode(mode, "mount"), reference=source)
        elif binding is not None and binding["kind"] == "outputs":
            raise UsageError(f"The input {name!r} of a step is bound to an output of its own pipeline. Give a step's.")
        elif binding is not None and binding["name"] in pipeline.inputs:
            parent = pipeline.inputs[binding["name"]]
            bound[name] = replace(parent, mode=_mode(mode, parent.mode))
        elif value is not None and binding is None:
            bound[name] = _input({**value, "mode": mode})
        elif declaration.get("default") is not None:
            bound[name] = InputBody(literal=text_of(declaration["default"]))
    return bound


def _bound_outputs(spec: _Document, node: _Document, pipeline: _Pipeline) -> dict[str, OutputBody]:
    given = _mapping(node, "outputs")
    bound = {}
    for name, declaration in _named(spec, "outputs").items():
        value = given.get(name) or {}
        binding = read_binding(value.get("value", value.get("uri")))
        kind = str(declaration.get("type") or either(declaration, "jobOutputType") or "uri_folder")
        mode = value.get("mode") or declaration.get("mode")
        if binding is None:
            bound[name] = OutputBody(value.get("uri") or None, _mode(mode, "mount"), kind)
            continue
        parent = pipeline.outputs.get(binding["name"])
        if binding["kind"] != "outputs" or binding["step"] is not None or parent is None:
            raise UsageError(
                f"The output {name!r} of a step is bound to {value.get('value', value.get('uri'))!r}, which is none of "
                f"its pipeline's outputs: {', '.join(sorted(pipeline.outputs)) or 'none'}."
            )
        bound[name] = OutputBody(
            mode=_mode(mode, parent.mode), type=kind, reference=Reference(pipeline.path, binding["name"])
        )
    return bound


def _sweep(
    properties: _Document, trial: _Document, inputs: _Inputs, outputs: _Outputs, compute: str | None = None
) -> SweepBody:
    limits, objective = _mapping(properties, "limits"), _mapping(properties, "objective")
    if either(properties, "earlyTermination"):
        kind = either(_mapping(properties, "earlyTermination"), "policyType")
        raise UsageError(
            f"The local workspace ends no trial early, and this sweep has the policy {kind!r}. Submit it without "
            "early_termination."
        )
    command = {**trial, "limits": {"timeout": either(limits, "trialTimeout")}}
    body = _command(command, inputs, outputs, compute)
    space = read_search_space(_mapping(properties, "searchSpace"), either(properties, "samplingAlgorithm"))
    with_values(body.command, dict.fromkeys(space.expressions, ""))  # refuses a name that the search space lacks
    most = int(either(limits, "maxTotalTrials") or _MOST_TRIALS)
    return SweepBody(
        trial=body,
        space=space,
        most_trials=most,
        most_at_once=min(most, int(either(limits, "maxConcurrentTrials") or most)),
        metric=str(either(objective, "primaryMetric")),
        maximize=str(objective["goal"]).lower() == "maximize",
        timeout_s=_seconds(either(limits, "timeout")),
    )


def _command(
    properties: _Document, inputs: _Inputs, outputs: _Outputs, default_compute: str | None = None
) -> CommandBody:
    resources = _mapping(properties, "resources")
    distribution = _mapping(properties, "distribution")
    nodes = int(either(resources, "instanceCount") or 1)
    processes = int(either(distribution, "processCountPerInstance") or 1)
    if nodes < 1 or not 1 <= processes <= _MOST_PROCESSES:
        raise UsageError(
            f"The job has {nodes} nodes of {processes} processes. Give at least one node, and 1 to {_MOST_PROCESSES} "
            "processes per node."
        )
    kind = either(distribution, "distributionType")
    if kind not in (None, "PyTorch"):
        raise UsageError(f"The local workspace starts PyTorch jobs, and this job's distribution is {kind!r}.")
    compute = str(either(properties, "computeId") or default_compute or "serverless")
    code = either(properties, "codeId") or properties.get("code")
    return CommandBody(
        command=str(properties["command"]),
        code=None if code is None else str(code),
        inputs=inputs,
        outputs=outputs,
        environment_variables=_variables(properties),
        compute=compute.rpartition("/")[2],
        nodes=nodes,
        most_nodes=max(nodes, int(either(resources, "maxInstanceCount") or nodes)),
        processes=processes,
        distributed=kind is not None,
        timeout_s=_seconds(either(_mapping(properties, "limits"), "timeout")),
    )


def _input(value: _Document) -> InputBody:
    if either(value, "jobInputType") == "literal":
        return InputBody(literal=text_of(value.get("value")))
    return InputBody(uri=str(value["uri"]), mode=_mode(value.get("mode"), "mount"))


def _mode(value: object, default: Mode) -> Mode:
    """Return the mode of a name such as ``ReadOnlyMount``, ``ro_mount`` or ``EvalDownload``."""
    if value is None:
        return default
    for mode in _MODES:
        if str(value).lower().endswith(mode):
            return mode
    raise ValueError(f"there is no mode {value!r}")


def _mapping(value: _Document, name: str) -> dict[str, Any]:
    found = either(value, name) or {}
    if not isinstance(found, Mapping):
        raise UsageError(f"{name!r} of the job is {found!r:.100}. Give an object.")
    return dict(found)


def _named(value: _Document, name: str) -> dict[str, Any]:
    found = {each: held for each, held in _mapping(value, name).items() if held is not None}
    for each in found:
        if not _NAME.fullmatch(each):
            raise UsageError(
                f"{each!r:.100} is not a name in the {name} of a job. Use at most 255 letters, digits, "
                "'-', '_' and '.'."
            )
    return found


def _variables(properties: _Document) -> dict[str, str]:
    found = _mapping(properties, "environmentVariables")
    for name, value in found.items():
        if not isinstance(value, str) or "=" in name or "\0" in name + value:
            raise UsageError(
                f"The environment variable {name!r:.100} cannot have the value {value!r:.100}. Give a string."
            )
    return found


def _seconds(text: object) -> float | None:
    """Parse an ISO 8601 duration such as ``PT1H30M``, or the seconds that steps of pipelines have."""
    try:
        return None if text is None else _DURATION.validate_python(text).total_seconds()
    except ValidationError as error:
        raise UsageError(f"The timeout {text!r} is not an ISO 8601 duration such as PT1H.") from error
