"""Submitted jobs, parsed from the documents that reach Azure ML: command jobs and pipelines of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.expressions import parent_reference

__all__ = ["CommandBody", "InputBody", "OutputBody", "PipelineBody", "read_job"]

Mode = Literal["download", "upload", "mount", "direct"]

_MODES: dict[str, Mode] = {
    "download": "download",
    "direct": "direct",
    "evaldownload": "download",
    "evalmount": "mount",
    "readonlymount": "mount",
    "readwritemount": "mount",
    "romount": "mount",
    "rwmount": "mount",
    "upload": "upload",
}
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,254}")
_MOST_PROCESSES = 256
_DURATION = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+(?:\.\d+)?)S)?)?")


@dataclass(frozen=True)
class InputBody:
    """An input: a literal, or the URI of a file or folder and its delivery mode."""

    literal: str | None = None
    uri: str | None = None
    mode: Mode = "mount"


@dataclass(frozen=True)
class OutputBody:
    """An output; without a URI it gets a location of the job's own."""

    uri: str | None = None
    mode: Mode = "mount"
    type: str = "uri_folder"


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
class PipelineBody:
    """A pipeline of steps that run in parallel."""

    steps: Mapping[str, CommandBody]
    continue_on_step_failure: bool = False


def read_job(
    properties: Mapping[str, Any], component: Callable[[str], Mapping[str, Any]]
) -> CommandBody | PipelineBody:
    """Parse the properties of a job document.

    Args:
        properties: properties of the document.
        component: function that returns the specification of a component by its id.

    Raises:
        UsageError: the local workspace does not run such jobs, or the document is malformed.
    """
    try:
        return _read_job(properties, component)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise UsageError(
            f"The job's document is malformed: {error!r}. Build the job with azure-ai-ml, which writes valid ones."
        ) from error


def _read_job(
    properties: Mapping[str, Any], component: Callable[[str], Mapping[str, Any]]
) -> CommandBody | PipelineBody:
    kind = properties.get("jobType")
    if kind == "Command":
        return _command(properties, inputs=_inputs(properties), outputs=_outputs(properties), default_compute=None)
    if kind == "Pipeline":
        return _pipeline(properties, component)
    raise UsageError(
        f"The local workspace runs command jobs and pipelines of them, but this job is of type {kind!r}. Submit the "
        "training as a command job."
    )


def _pipeline(properties: Mapping[str, Any], component: Callable[[str], Mapping[str, Any]]) -> PipelineBody:
    inputs, outputs = _inputs(properties), _outputs(properties)
    settings = _mapping(properties, "settings")
    default = properties.get("computeId") or settings.get("default_compute")
    steps = {}
    for name, node in _named(properties, "jobs").items():
        if node.get("type") != "command":
            raise UsageError(
                f"The step {name!r} is of type {node.get('type')!r}; the local workspace runs steps of type 'command'."
            )
        spec = component(str(node["componentId"]))
        step = {**spec, **{key: value for key, value in node.items() if value is not None}}
        step["environment_variables"] = {
            **_mapping(spec, "environment_variables"),
            **_mapping(node, "environment_variables"),
        }
        steps[name] = _command(
            step,
            inputs=_bound_inputs(spec, node, inputs),
            outputs=_bound_outputs(spec, node, outputs),
            default_compute=default,
        )
    if not steps:
        raise UsageError("The pipeline has no steps. Give it at least one command.")
    return PipelineBody(steps, bool(settings.get("continue_on_step_failure")))


def _bound_inputs(
    spec: Mapping[str, Any], node: Mapping[str, Any], parents: Mapping[str, InputBody]
) -> dict[str, InputBody]:
    declared, given = _named(spec, "inputs"), _mapping(node, "inputs")
    bound = {}
    for name, declaration in declared.items():
        value = given.get(name)
        if value is None:
            if declaration.get("default") is not None:
                bound[name] = InputBody(literal=_text(declaration["default"]))
            continue
        reference = parent_reference(value.get("value", value.get("uri")))
        mode = value.get("mode") or declaration.get("mode")
        if reference is None:
            bound[name] = _input({**value, "mode": mode})
        elif reference[1] in parents:
            parent = parents[reference[1]]
            bound[name] = InputBody(parent.literal, parent.uri, _mode(mode, parent.mode))
    return bound


def _bound_outputs(
    spec: Mapping[str, Any], node: Mapping[str, Any], parents: Mapping[str, OutputBody]
) -> dict[str, OutputBody]:
    given = _mapping(node, "outputs")
    bound = {}
    for name, declaration in _named(spec, "outputs").items():
        value = given.get(name) or {}
        reference = parent_reference(value.get("value", value.get("uri")))
        kind = str(declaration.get("type") or "uri_folder")
        mode = _mode(value.get("mode") or declaration.get("mode"), "mount")
        uri = value.get("uri") or None if reference is None else parents.get(reference[1], OutputBody()).uri
        bound[name] = OutputBody(uri, mode, kind)
    return bound


def _command(
    properties: Mapping[str, Any],
    *,
    inputs: Mapping[str, InputBody],
    outputs: Mapping[str, OutputBody],
    default_compute: str | None,
) -> CommandBody:
    resources = _mapping(properties, "resources")
    distribution = _mapping(properties, "distribution")
    nodes = int(_either(resources, "instanceCount") or 1)
    processes = int(_either(distribution, "processCountPerInstance") or 1)
    if nodes < 1 or not 1 <= processes <= _MOST_PROCESSES:
        raise UsageError(
            f"The job has {nodes} nodes of {processes} processes. Give at least one node, and 1 to {_MOST_PROCESSES} "
            "processes per node."
        )
    kind = _either(distribution, "distributionType")
    if kind not in (None, "PyTorch"):
        raise UsageError(f"The local workspace starts PyTorch jobs, and this job's distribution is {kind!r}.")
    compute = str(_either(properties, "computeId") or default_compute or "serverless")
    code = _either(properties, "codeId") or properties.get("code")
    return CommandBody(
        command=str(properties["command"]),
        code=None if code is None else str(code),
        inputs=inputs,
        outputs=outputs,
        environment_variables=_variables(properties),
        compute=compute.rpartition("/")[2],
        nodes=nodes,
        most_nodes=max(nodes, int(_either(resources, "maxInstanceCount") or nodes)),
        processes=processes,
        distributed=kind is not None,
        timeout_s=_seconds(_either(_mapping(properties, "limits"), "timeout")),
    )


def _inputs(properties: Mapping[str, Any]) -> dict[str, InputBody]:
    return {name: _input(value) for name, value in _named(properties, "inputs").items() if value is not None}


def _outputs(properties: Mapping[str, Any]) -> dict[str, OutputBody]:
    return {
        name: OutputBody(
            value.get("uri") or None,
            _mode(value.get("mode"), "mount"),
            str(_either(value, "jobOutputType") or "uri_folder"),
        )
        for name, value in _named(properties, "outputs").items()
        if value is not None
    }


def _input(value: Mapping[str, Any]) -> InputBody:
    if _either(value, "jobInputType") == "literal":
        return InputBody(literal=_text(value.get("value")))
    return InputBody(uri=str(value["uri"]), mode=_mode(value.get("mode"), "mount"))


def _mode(value: object, default: Mode) -> Mode:
    return default if value is None else _MODES[str(value).replace("_", "").lower()]


def _text(value: object) -> str:
    return str(value) if not isinstance(value, bool) else str(value).lower()


def _mapping(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = _either(value, name) or {}
    if not isinstance(found, Mapping):
        raise UsageError(f"{name!r} of the job is {found!r:.100}. Give an object.")
    return dict(found)


def _named(value: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a mapping whose names become parts of paths."""
    found = _mapping(value, name)
    for each in found:
        if not _NAME.fullmatch(each):
            raise UsageError(
                f"{each!r:.100} is not a name in the {name} of a job. Use at most 255 letters, digits, "
                "'-', '_' and '.'."
            )
    return found


def _variables(properties: Mapping[str, Any]) -> dict[str, str]:
    found = _mapping(properties, "environmentVariables")
    for name, value in found.items():
        if not isinstance(value, str) or "=" in name or "\0" in name + value:
            raise UsageError(
                f"The environment variable {name!r:.100} cannot have the value {value!r:.100}. Give a string."
            )
    return found


def _either(value: Mapping[str, Any], name: str) -> Any:
    """Return a field that is in camel case in jobs and in snake case in pipeline steps."""
    snake = re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", name)
    found = value.get(name)
    return value.get(snake) if found is None else found


def _seconds(text: object) -> float | None:
    """Parse an ISO 8601 duration such as ``PT1H30M``, in seconds."""
    if text is None:
        return None
    match = _DURATION.fullmatch(str(text))
    if match is None:
        raise UsageError(f"The timeout {text!r} is not an ISO 8601 duration such as PT1H.")
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
