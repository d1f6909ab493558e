"""Conversion of azure-ai-ml's entities to documents in the YAML schema of jobs.

Entities are read by their public names. Settings that YAML has no field for are rejected by name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.conversion import located
from azureml_elastic.submit.sdk_hooks import plain_command_job

__all__ = ["PathFormat", "document_of", "real_path"]

_SCHEMA = "https://azuremlschemas.azureedge.net/latest/{}Job.schema.json"
_ANONYMOUS = re.compile(r"CliV2AnonymousEnvironment|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_IDENTIFICATION = ("name", "display_name", "experiment_name", "description", "tags", "properties")
_NODE = ("resources", "limits", "identity", "services", "queue_settings", "distribution")
_FIELDS = {
    "input": ("type", "path", "mode", "datastore"),
    "output": ("type", "path", "mode", "name", "version"),
    "resources": (
        *("instance_count", "max_instance_count", "instance_type", "shm_size", "docker_args", "locations"),
        "properties",
    ),
    "limits": ("timeout",),
    "identity": ("type", "client_id", "object_id"),
    "service": ("type", "nodes", "port", "log_dir", "ssh_public_keys", "properties"),
    "queue_settings": ("job_tier", "priority"),
    "distribution": ("type", "process_count_per_instance"),
    "settings": ("continue_on_step_failure", "force_rerun", "default_compute", "default_datastore"),
}
"""The fields of each kind of entity in YAML."""

_LOWER_CASE = frozenset({"job_tier", "priority"})
"""Fields whose values are lower case in YAML."""

_UNWRITTEN = {
    "pipeline": ("identity", "services"),
    "node": ("description", "comment", "tags", "properties"),
    "component": ("display_name", "description", "tags", "properties", "resources", "distribution"),
}
"""Attributes of these entities that are not written, and that are unset in elastic jobs."""

_IMPLIED = {"limits": "type"}
"""Attributes that are always set and follow from the kind of entity."""


@dataclass(frozen=True)
class PathFormat:
    """Format of local paths in a document."""

    folder: Path | None = None
    """Folder of the file to write; ``None`` makes all paths absolute."""
    absolute: frozenset[str] = frozenset()
    """Paths that stay absolute."""
    base: Path = Path()
    """Folder that the entity's paths are relative to."""
    resolved: bool = False
    """Whether symbolic links are resolved, as azure-ai-ml does when it reads YAML."""

    def format(self, path: str) -> str:
        """Return a path relative to the folder, absolute, or with its scheme."""
        whole = located(path, self.base)
        if not Path(whole).is_absolute():
            return whole
        there = real_path(whole, named=not self.resolved)
        if self.folder is None or there in self.absolute:
            return there
        try:
            relative = Path(os.path.relpath(there, os.path.realpath(self.folder)))
        except ValueError:  # on another drive of Windows
            return there
        return relative.as_posix() if relative.parts[:1] == ("..",) else f"./{relative.as_posix()}".removesuffix("/.")


def real_path(path: str | os.PathLike[str], *, named: bool = True) -> str:
    """Return a path with symbolic links resolved; ``named`` keeps the last component even if it is a link."""
    parent, name = os.path.split(Path(path).absolute())
    return str(Path(os.path.realpath(parent), name)) if named and name != ".." else os.path.realpath(path)


def document_of(entity: Any, paths: PathFormat, absent: Collection[str] = ()) -> dict[str, Any]:
    """Return the document of a command job, or of a pipeline of command nodes without their ``absent`` outputs.

    Raises:
        SubmitError: the entity has a setting that YAML has no field for.
    """
    if hasattr(type(entity), "jobs"):
        return _pipeline(entity, paths, absent)
    return _command(plain_command_job(entity), paths)


def _command(job: Any, paths: PathFormat) -> dict[str, Any]:
    outputs = {
        name: None if value is None else _fields("output", f"The output {name!r}", value)
        for name, value in (job.outputs or {}).items()
    }
    return {
        "$schema": _SCHEMA.format("command"),
        "type": "command",
        **_identification(job),
        **_computed(job.compute),
        **_program(job, paths),
        **_unless_empty("environment_variables", dict(job.environment_variables or {})),
        **_unless_empty("inputs", {name: _input(name, value, paths) for name, value in (job.inputs or {}).items()}),
        **_unless_empty("outputs", outputs),
        **_node(job),
        **_unless_empty("parent_job_name", getattr(job, "parent_job_name", None)),
    }


def _pipeline(job: Any, paths: PathFormat, absent: Collection[str]) -> dict[str, Any]:
    """Return a pipeline whose equal parts are the same objects, which are dumped as YAML anchors."""
    parts: dict[str, list[Any]] = {}
    nodes: dict[str, Any] = {}
    _check_unwritten("pipeline", job)
    for name, node in job.jobs.items():
        _check_unwritten("node", node)
        _check_unwritten("component", node.component)
        build = getattr(node.component.environment, "build", None)
        if build is not None and "://" in str(build.path):
            raise SubmitError(
                f"The environment is built from {build.path!r}, which azure-ai-ml gives a new name whenever it reads "
                "it, so each node would get a separate environment. Register it with "
                "ml_client.environments.create_or_update(...), and give its name."
            )
        bound = {} if nodes else {key: f"${{{{parent.outputs.{key}}}}}" for key in job.outputs}
        own = {key: _node_output(key, node) for key in node.component.outputs if key not in {*bound, *absent}}
        fields = {
            "type": "command",
            **_unless_empty("display_name", node.display_name),
            **_computed(node.compute),
            "component": _component(node.component, paths),
            **_unless_empty("environment_variables", dict(node.environment_variables or {})),
            **_unless_empty("inputs", {key: f"${{{{parent.inputs.{key}}}}}" for key in node.component.inputs}),
            **_unless_empty("outputs", {**bound, **own}),
            **_node(node),
        }
        nodes[name] = {key: _shared(value, parts.setdefault(key, [])) for key, value in fields.items()}
    return {
        "$schema": _SCHEMA.format("pipeline"),
        "type": "pipeline",
        **_identification(job),
        **_computed(job.compute),
        "settings": _fields("settings", "The pipeline's settings", job.settings),
        **_unless_empty("inputs", {name: _input(name, value.result(), paths) for name, value in job.inputs.items()}),
        **_unless_empty("outputs", {name: _pipeline_output(name, job) for name in job.outputs}),
        "jobs": nodes,
    }


def _check_unwritten(kind: str, held: Any) -> None:
    for name in _UNWRITTEN[kind]:
        if getattr(held, name, None):
            raise SubmitError(f"The {kind} has {name}, which is not written as YAML. Submit the job from Python.")


def _component(component: Any, paths: PathFormat) -> dict[str, Any]:
    inputs = {name: _fields("input", f"The input {name!r}", value) for name, value in component.inputs.items()}
    outputs = {
        name: {key: getattr(value, key) for key in ("type", "mode") if getattr(value, key) is not None}
        for name, value in component.outputs.items()
    }
    return {
        "type": "command",
        **_program(component, paths),
        "is_deterministic": component.is_deterministic,
        **_unless_empty("inputs", inputs),
        **_unless_empty("outputs", outputs),
    }


def _node_output(name: str, node: Any) -> dict[str, Any]:
    """Return an output of a pipeline's node, completed from the declaration of its component."""
    own, declared = node.outputs[name], node.component.outputs[name]
    fields = {key: getattr(own, key, None) or getattr(declared, key, None) for key in _FIELDS["output"]}
    _fields("output", f"The output {name!r}", declared)
    return {key: value for key, value in fields.items() if value is not None}


def _pipeline_output(name: str, job: Any) -> dict[str, Any]:
    """Return an output of a pipeline, which its first node is bound to."""
    component = next(iter(job.jobs.values())).component
    _fields("output", f"The output {name!r}", component.outputs[name])
    fields = {key: getattr(job.outputs[name], key, None) for key in _FIELDS["output"]}
    return {key: value for key, value in fields.items() if value is not None}


def _identification(job: Any) -> dict[str, Any]:
    found = {name: getattr(job, name, None) for name in _IDENTIFICATION}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in found.items() if value}


def _program(holder: Any, paths: PathFormat) -> dict[str, Any]:
    code = getattr(holder, "code", None)
    return {
        **_unless_empty("code", None if code is None else paths.format(str(code))),
        "command": holder.command,
        "environment": _environment(holder.environment, paths),
    }


def _computed(compute: Any) -> dict[str, str]:
    return {} if not compute else {"compute": compute if str(compute).startswith("azureml:") else f"azureml:{compute}"}


def _node(holder: Any) -> dict[str, Any]:
    """Return the settings of a node: resources, limits, identity and others."""
    fields: dict[str, Any] = {}
    for name in _NODE:
        value = getattr(holder, name, None)
        if name == "services" and value:
            fields[name] = {key: _fields("service", f"The service {key!r}", one) for key, one in value.items()}
        elif name != "services" and value is not None:
            fields |= _unless_empty(name, _fields(name, name, value))
    return fields


def _input(name: str, value: Any, paths: PathFormat) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    fields = _fields("input", f"The input {name!r}", value)
    return fields | _unless_empty("path", None if fields.get("path") is None else paths.format(str(fields["path"])))


def _environment(environment: Any, paths: PathFormat) -> Any:
    if isinstance(environment, str):
        scheme = environment.startswith(("azureml:", "azureml://"))
        return environment if scheme else f"azureml:{environment}"
    if environment.id:
        return f"azureml:{environment.id}"
    if environment.name and not _ANONYMOUS.fullmatch(environment.name):
        raise SubmitError(
            f"The environment {environment.name!r} would be registered by the job, which YAML cannot express. Register "
            f"it with ml_client.environments.create_or_update(...), and give environment='azureml:{environment.name}:"
            f"{environment.version or 1}'."
        )
    fields = {
        name: getattr(environment, name, None) for name in ("image", "os_type", "description", "tags", "properties")
    }
    for name in ("inference_config", "datastore"):
        if getattr(environment, name, None):
            raise SubmitError(f"The environment has {name}, which the YAML of a job cannot express. Leave it out.")
    if environment.conda_file:
        fields["conda_file"] = _plain(environment.conda_file)
    if environment.build is not None:
        local = environment.path or environment.build.path
        fields["build"] = {
            **_unless_empty("path", None if local is None else paths.format(str(local))),
            **_unless_empty("dockerfile_path", environment.build.dockerfile_path),
        }
    return {name: value for name, value in fields.items() if value}


def _fields(kind: str, what: str, held: Any) -> dict[str, Any]:
    """Return the fields of an entity, rejecting settings that YAML has no field for."""
    names = _FIELDS[kind]
    for name in sorted(vars(held)):
        expected = name.startswith("_") or name in names or name == _IMPLIED.get(kind)
        if not expected and vars(held)[name] not in (None, False, {}, []):
            raise SubmitError(
                f"{what} has {name}, which the YAML of a job cannot express. Leave it out, or submit the job from "
                "Python."
            )
    found = {name: _plain(getattr(held, name, None)) for name in names}
    fields = {name: value for name, value in found.items() if value not in (None, {}, [])}
    return {name: value.lower() if name in _LOWER_CASE else value for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """Return a value as plain dictionaries and lists."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _unless_empty(name: str, value: Any) -> dict[str, Any]:
    return {} if value is None or value == {} else {name: value}


def _shared(found: Any, earlier: list[Any]) -> Any:
    """Return an equal object from ``earlier``, or add this one to it and return it."""
    if not isinstance(found, dict):
        return found
    for one in earlier:
        if one == found:
            return one
    earlier.append(found)
    return found
