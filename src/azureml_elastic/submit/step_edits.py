"""Nodes that jobs and sweeps have been compiled to, and what their authors set on them.

A node of azure-ai-ml takes every attribute; what it does not send is lost without a word, and what it does send may
contradict the plan of the job. Here a step is compared, when its pipeline is built and again when it is validated, with
what it was compiled to. A change that is a field of the job compiles the job once more with that field, so that it is
checked as any other; what cannot be changed is refused.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit.conversion import FIELDS_OF_RESOURCES, queue_fields
from azureml_elastic.submit.fields import JobFields, merged_fields
from azureml_elastic.submit.sdk_hooks import is_binding, outside_pipelines

with needs_extra("azure-ai-ml", "submit"):
    from azure.ai.ml.entities import Command, CommandComponent, Pipeline, PipelineJob, Sweep

Compile = Callable[[JobFields], "tuple[Command | PipelineJob | Pipeline | Sweep, Command | None]"]
"""Function that returns the node of a job, and a command with the settings of all its nodes where it is a pipeline."""

_Node = TypeVar("_Node", bound="Command | Pipeline | Sweep")

_CARRIED = frozenset(
    {"comment", "description", "display_name", "experiment_name", "kwargs", "name", "properties", "tags"}
)
"""What azure-ai-ml does with an elastic step as with any other."""

_COMPILED = (
    *("compute", "distribution", "environment_variables", "identity", "limits", "queue_settings", "resources"),
    "services",
)
"""What the nodes have from the fields of a job, beside their component."""

_COMPILED_OF_SWEEPS = (
    "compute",
    "identity",
    "queue_settings",
    "resources",
    "trial.environment_variables",
    "trial.resources",
)

_OF_SWEEPS = frozenset({"early_termination", "limits", "objective", "sampling_algorithm", "search_space"})
"""How a sweep searches, which is no setting of its job."""

_OF_TRIALS = ("code", "command", "distribution", "environment", "environment_variables", "resources")
_SEARCHED = re.compile(r"\$\{\{\s*search_space\.")

_OF_PIPELINES = frozenset({"compute", "services"})
"""Settings that each pipeline has, too, and that mean nothing there."""


class _Step:
    """What a step has beside what its class of azure-ai-ml gives it."""

    _job: JobFields
    _again: Compile
    _template: Command | Sweep
    _before: Mapping[str, Any]

    def _set_base_path(self, base_path: Any) -> None:
        """Apply what was set; azure-ai-ml calls this of each node when it builds a pipeline."""
        self._apply()
        super()._set_base_path(base_path)  # type: ignore[misc]

    def _customized_validate(self) -> Any:
        """Apply what was set since; azure-ai-ml calls this of each node before it sends a pipeline."""
        self._apply()
        return super()._customized_validate()  # type: ignore[misc]

    def sweep(self, **_: Any) -> Any:
        """Refuse to make trials, which would not have the plan of the job."""
        raise SubmitError(
            "A step cannot be swept, as its trials would lose what nodes need; set it on the job: "
            "job(lr=Uniform(0.01, 0.1), ...).sweep(...) is a step, too."
        )

    def _apply(self) -> None:
        node: Any = self
        if isinstance(_component(node), str):  # it has been submitted, and azure-ai-ml has put ids in its place
            return
        self._collect(node)
        now = _settings(self._template)
        changed = [name for name in now if now[name] != self._before.get(name) and not _is_resolved(name, now[name])]
        if {"resources", "trial.resources"} <= {*changed} and now["resources"] == now["trial.resources"]:
            changed.remove("trial.resources")  # a sweep and its trial have one object
        if not changed:
            return
        fields: dict[str, Any] = {}
        for name in changed:
            if "${{" in str(now[name]):  # what the job is checked with must be known, and the nodes see other inputs
                raise _refused(name, now[name])
            fields |= self._field(name, _setting(self._template, name), self._before.get(name) or {})
        own = fields.pop("environment_variables", self._job.environment_variables)
        job = type(self._job)(**{**merged_fields(self._job, fields), "environment_variables": own})
        with outside_pipelines():
            made, template = self._again(job)
        for old, new in zip(_nodes(node), _nodes(made), strict=True):
            if _component(old).command != _component(new).command:
                raise _refused(changed[0], now[changed[0]])
            for name in _COMPILED_OF_SWEEPS if isinstance(new, Sweep) else _COMPILED:
                _set(old, name, _setting(new, name))
        self._template = template or node
        self._job, self._before = job, _settings(self._template)

    def _collect(self, node: Any) -> None:
        """Bring what was set on a step to its template, and refuse what no template has."""
        for name, value in node.items():
            if value or not isinstance(value, dict):  # reading an attribute that there is not leaves an empty one
                raise _refused(name, value)

    def _field(self, name: str, value: Any, before: Any) -> dict[str, Any]:
        if name in {"environment_variables", "trial.environment_variables"}:
            # Those of the presets and the plan stay, also where all are replaced.
            own = self._job.environment_variables
            kept = {key: each for key, each in (value or {}).items() if key in own or before.get(key) != each}
            return {"environment_variables": kept}
        limits = _plain(value) or {}
        if name == "limits" and isinstance(limits, dict) and limits.keys() <= {"timeout", "type"}:
            return {"timeout": limits.get("timeout")}
        if name == "queue_settings":
            return queue_fields(value)
        if name == "resources":
            return {"resources": dict(self._of_resources(_plain(value) or {}, before))}
        if name in ("identity", "services") or (name == "compute" and not self._job.pools):
            return {name: value}
        raise _refused(name, value)

    def _of_resources(self, now: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        """Yield the fields of the resources that are other ones; those that are left out stay."""
        planned = self._job.resources
        for name, value in now.items():
            if value == before.get(name):
                continue
            if name in FIELDS_OF_RESOURCES:
                yield name, value
            elif (
                (name, planned.effective_placement) == ("instance_count", "gang")
                and isinstance(value, int)
                and planned.min_instance_count <= value <= planned.max_instance_count
            ):
                yield "max_instance_count", value
            else:
                raise _refused(f"resources.{name}", value)


class _CommandStep(_Step, Command):
    """A step whose nodes the service starts; it is its own template."""

    def __call__(self, *arguments: Any, **inputs: Any) -> Any:
        """Return another step, which is a run of its own."""
        self._apply()
        return as_step(super().__call__(*arguments, **inputs), None, self._job, self._again)


class _SweepStep(_Step, Sweep):
    """A sweep, whose trials have the settings of the job."""

    def _set_base_path(self, base_path: Any) -> None:
        super()._set_base_path(base_path)
        if self.identity is not None:
            raise SubmitError(
                "azure-ai-ml sends no identity of a sweep that is a step of a pipeline. Submit the sweep by itself, or "
                "leave the identity out, as in job.model_copy(update={'identity': None}).sweep(...)."
            )

    def _to_job(self) -> Any:
        """Apply what was set; azure-ai-ml submits the result of this where the sweep is no step."""
        self._apply()
        return super()._to_job()


class _Trial(CommandComponent):
    """The component of a sweep's trials, whose command sets their environment variables.

    A component has none in Azure ML, and the trials of a sweep that is a step have what its component has. A sweep by
    itself has the variables beside its command, both as they are here.
    """

    def _to_dict(self) -> dict[str, Any]:
        fields = super()._to_dict()
        variables = " ".join(f"{name}={shlex.quote(str(value))}" for name, value in self.environment_variables.items())
        return {**fields, "command": f"export {variables} && {fields['command']}"}


class _NodesStep(_Step, Pipeline):
    """A step whose nodes are a pipeline, with the settings of a command, which are those of all nodes."""

    def __call__(self, **_: Any) -> Any:
        """Refuse to make another step, which would be of the same run."""
        raise SubmitError("A step cannot be called. For another step, call the job once more.")

    def set_limits(self, **limits: Any) -> None:
        """Set the limits of each node, as of a command."""
        self._template.set_limits(**limits)

    def set_resources(self, **resources: Any) -> None:
        """Set the resources of each node, as of a command."""
        self._template.set_resources(**resources)

    def set_queue_settings(self, **settings: Any) -> None:
        """Set the queue settings of each node, as of a command."""
        self._template.set_queue_settings(**settings)

    def _collect(self, node: Any) -> None:
        super()._collect(node)
        held = {**vars(node.settings), **node.settings}
        if settings := _plain({name: value for name, value in held.items() if not name.startswith("_")}):
            raise _refused("settings", settings)
        for name in _OF_PIPELINES:
            if value := getattr(node, name):
                setattr(self._template, name, value)
                setattr(node, name, None)


def as_step(node: _Node, template: Command | None, job: JobFields, again: Compile) -> _Node:
    """Make a node one whose settings are applied, and return it.

    Args:
        template: command with the settings of all nodes of a pipeline; other nodes have their own.
        again: compiles a changed job to such a node.
    """
    step: Any = node
    held = template or step
    if isinstance(node, Command):
        step.__class__ = _CommandStep
    elif isinstance(node, Sweep):
        step.__class__, step.trial.__class__ = _SweepStep, _Trial
    else:
        for name in set(_settable(held)) - _CARRIED - _OF_PIPELINES - vars(_NodesStep).keys():
            setattr(_NodesStep, name, _of_template(name))
        step.__class__ = _NodesStep
    vars(step).update(_job=job, _again=again, _template=held, _before=_settings(held))
    return node


def _of_template(name: str) -> property:
    def read(self: Any) -> Any:
        return getattr(self._template, name)

    def write(self: Any, value: Any) -> None:
        setattr(self._template, name, value)

    return property(read, write)


def _nodes(node: Any) -> list[Any]:
    return [node] if isinstance(node, Command | Sweep) else list(node.component.jobs.values())


def _component(node: Any) -> Any:
    return node.trial if isinstance(node, Sweep) else node.component


def _settings(node: Any) -> dict[str, Any]:
    names = sorted(set(_settable(node)) - _CARRIED)
    if isinstance(node, Sweep):
        names = [*sorted(set(names) - _OF_SWEEPS), *(f"trial.{name}" for name in _OF_TRIALS)]
    found = {name: _plain(_setting(node, name)) for name in names}
    if "trial.command" in found:  # azure-ai-ml writes the search space into it when it converts a sweep
        found["trial.command"] = _SEARCHED.sub("${{inputs.", found["trial.command"])
    return found


def _setting(node: Any, name: str) -> Any:
    holder = node.trial if name.startswith("trial.") else node
    return getattr(holder, name.removeprefix("trial."))


def _set(node: Any, name: str, value: Any) -> None:
    setattr(node.trial if name.startswith("trial.") else node, name.removeprefix("trial."), value)


def _is_resolved(name: str, value: Any) -> bool:
    """Return whether azure-ai-ml has put an id in the place of what a node was given, as it does at submission."""
    return name.removeprefix("trial.") in {"code", "environment"} and "/subscriptions/" in str(value)


def _settable(node: Any) -> Iterator[str]:
    yield from (name for name in vars(node) if not name.startswith("_"))
    for base in type(node).__mro__:
        properties = ((name, value) for name, value in vars(base).items() if isinstance(value, property))
        yield from (name for name, value in properties if value.fset and not name.startswith("_"))


def _plain(value: Any) -> Any:
    """Return a setting as values that can be compared, and that a change of it does not change."""
    if is_binding(value):
        return str(value)
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items() if each is not None}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return _plain(vars(value)) if hasattr(value, "__dict__") else value


def _refused(name: str, value: Any) -> SubmitError:
    field, _, count = name.removeprefix("trial.").partition(".")
    if count:
        change = f"job.with_options(resources={{'max_instance_count': {value!r}}})"
    else:
        known = field in JobFields.model_fields
        change = f"job.with_options({field}=...)" if known else "job.with_options(...), or leave it out"
    if isinstance(value, dict):  # the values of variables are not shown
        value = sorted(value)
    return SubmitError(f"A step of an elastic job cannot have {name}={value!r:.100}; set it on the job: {change}.")
