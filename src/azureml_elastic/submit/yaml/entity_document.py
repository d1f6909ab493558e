"""Conversion of azure-ai-ml's entities to documents in the YAML schema of jobs.

azure-ai-ml dumps its entities itself, but not all of what it dumps can be submitted. This module replaces what it gets
wrong, and rejects by name the settings that it leaves out.
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
from azureml_elastic.submit.sdk_hooks import dumped, plain_command_job, value_of

_SCHEMA = "https://azuremlschemas.azureedge.net/latest/{}Job.schema.json"
_ANONYMOUS = re.compile(r"CliV2AnonymousEnvironment|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_OF_OUTPUTS = frozenset({"mode", "name", "path", "type", "version"})


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


def document_of(entity: Any, paths: PathFormat) -> dict[str, Any]:
    """Return the document of a command job, or of a pipeline of command nodes.

    Raises:
        SubmitError: the entity has a setting that YAML has no field for.
    """
    if hasattr(type(entity), "jobs"):
        dump = _plain(dumped(entity))
        inputs = {name: value.result() for name, value in entity.inputs.items()}
        return _job("pipeline", dump, inputs, paths, jobs=_nodes(entity.jobs, dump["jobs"], paths))
    job = plain_command_job(entity)
    dump = _plain(dumped(job))
    for name, output in (job.outputs or {}).items():
        _refuse_lost(f"The output {name!r}", output, dump["outputs"][name])
    return _job("command", dump, job.inputs or {}, paths, **_program(job, dump, paths), **_node(job, dump))


def _job(
    kind: str, dump: Mapping[str, Any], inputs: Mapping[str, Any], paths: PathFormat, **changes: Any
) -> dict[str, Any]:
    changes["inputs"] = {name: _input(name, value, dump["inputs"][name], paths) for name, value in inputs.items()}
    return _without_empty({"$schema": _SCHEMA.format(kind), "type": kind, **dump, **changes})


def documents_of_nodes(nodes: Mapping[str, Any], paths: PathFormat) -> dict[str, Any]:
    """Return the documents of command nodes of a pipeline by name; for the exceptions see :func:`document_of`."""
    from azure.ai.ml.entities import PipelineJob

    return _nodes(nodes, _plain(dumped(PipelineJob(jobs=dict(nodes))))["jobs"], paths)


def _nodes(held: Mapping[str, Any], dumps: Mapping[str, Any], paths: PathFormat) -> dict[str, Any]:
    """Return the nodes of a pipeline, whose equal parts are the same objects, which are dumped as YAML anchors."""
    parts: dict[str, list[Any]] = {}
    nodes: dict[str, Any] = {}
    for name, node in held.items():
        dump, component = dumps[name], node.component
        build = getattr(component.environment, "build", None)
        if build is not None and "://" in str(build.path):
            raise SubmitError(
                f"The environment is built from {build.path!r}, which azure-ai-ml gives a new name whenever it reads "
                "it, so each node would get a separate environment. Register it with "
                "ml_client.environments.create_or_update(...), and give its name."
            )
        for key, output in component.outputs.items():
            # A component's output may have more than those of the node and the pipeline, which have the rest of it.
            _refuse_lost(f"The output {key!r}", output, None, _OF_OUTPUTS)
        fields = {
            **dump,
            "display_name": node.display_name,  # which the dump has not
            "component": _component(component, dump["component"], paths),
            # The dump has {"path": "${{...}}"}, which is read as data even where the input is a number.
            "inputs": {key: _input(key, value_of(one), dump["inputs"][key], paths) for key, one in node.inputs.items()},
            **_node(node, dump),
        }
        nodes[name] = {key: _shared(one, parts.setdefault(key, [])) for key, one in _without_empty(fields).items()}
    return nodes


def _component(component: Any, dump: Mapping[str, Any], paths: PathFormat) -> dict[str, Any]:
    """Return a node's component without the name that azure-ai-ml makes up, and without the node's own variables."""
    own = {name: value for name, value in dump.items() if name not in {"environment_variables", "name", "version"}}
    return _without_empty({**own, **_program(component, dump, paths)})


def _program(holder: Any, dump: Mapping[str, Any], paths: PathFormat) -> dict[str, Any]:
    return {
        "code": None if holder.code is None else paths.format(str(holder.code)),
        "environment": _environment(holder.environment, dump["environment"], paths),
    }


def _node(holder: Any, dump: Mapping[str, Any]) -> dict[str, Any]:
    """Return the resources of a node, and refuse an identity that YAML has no fields for."""
    _refuse_lost("identity", holder.identity, dump.get("identity"))
    resources = dict(dump.get("resources") or {})
    if isinstance(resources.get("docker_args"), str):  # the dump has the text "['--ipc', 'host']" of a list
        resources["docker_args"] = _plain(holder.resources.docker_args)
    return {"resources": _without_empty(resources)}


def _input(name: str, value: Any, dump: Any, paths: PathFormat) -> Any:
    if isinstance(value, bool | int | float | str):
        return value  # the dump has 1 for True
    if not isinstance(dump, dict):  # the text of an object with an invalid mode, which loading it refuses by name
        dump = _without_empty({"type": value.type, "mode": value.mode})
    _refuse_lost(f"The input {name!r}", value, dump, {"path"})
    # The dump has azureml: before any path, which makes a folder the name of an asset.
    return {**dump, **({} if value.path is None else {"path": paths.format(str(value.path))})}


def _environment(environment: Any, dump: Any, paths: PathFormat) -> Any:
    if isinstance(environment, str):
        return dump
    if environment.id:
        return f"azureml:{environment.id}"
    if environment.name and not _ANONYMOUS.fullmatch(environment.name):
        raise SubmitError(
            f"The environment {environment.name!r} would be registered by the job, which YAML cannot express. Register "
            f"it with ml_client.environments.create_or_update(...), and give environment='azureml:{environment.name}:"
            f"{environment.version or 1}'."
        )
    _refuse_lost("The environment", environment, dump, {"name", "path"})
    # The dump has a name and a digest as version, under which it would be registered, and the system in lower case.
    fields = {**dump, "name": None, "version": None, "os_type": environment.os_type}
    if environment.build is not None:
        path = paths.format(str(environment.path or environment.build.path))
        fields["build"] = {**dump["build"], "path": path}
    return _without_empty(fields)


def _refuse_lost(what: str, held: Any, dump: Mapping[str, Any] | None, elsewhere: Collection[str] = ()) -> None:
    """Refuse settings of an object that azure-ai-ml's dump of it leaves out without a word."""
    for name, value in sorted(vars(held).items() if held is not None else ()):
        written = name.startswith("_") or name in elsewhere or (dump or {}).get(name)
        if not written and value not in (None, False, {}, []):
            raise SubmitError(
                f"{what} has {name}, which the YAML of a job cannot express. Leave it out, or submit the job from "
                "Python."
            )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _without_empty(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None and value != {}}


def _shared(found: Any, earlier: list[Any]) -> Any:
    if not isinstance(found, dict):
        return found
    for one in earlier:
        if one == found:
            return one
    earlier.append(found)
    return found
