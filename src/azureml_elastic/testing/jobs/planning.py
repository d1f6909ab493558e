"""What a submitted job consists of: the runs of its steps, their places in the storage account, and their order."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any, Literal

from azureml_elastic.errors import UsageError
from azureml_elastic.testing.jobs.body import (
    CommandBody,
    InputBody,
    JobBody,
    OutputBody,
    PipelineBody,
    Reference,
    SweepBody,
)
from azureml_elastic.testing.jobs.machines import Pool
from azureml_elastic.testing.jobs.nodes import CommandJob
from azureml_elastic.testing.jobs.runs import TERMINAL, Run, Status
from azureml_elastic.testing.jobs.search_space import with_values
from azureml_elastic.testing.storage import locate


def step_due(
    status: Status, reads: Iterable[Status], *, started: bool, cancelled: bool, stops: bool
) -> Literal["start", "skip", "cancel"] | None:
    """Return what is to be done with a step of a pipeline; ``skip`` for one that never starts.

    Args:
        reads: states of the steps whose outputs it reads.
        stops: whether all steps of the pipeline end.
    """
    if status in TERMINAL:
        return None
    if started:
        return "cancel" if stops and not cancelled else None
    states = set(reads)
    if stops or cancelled or states & (TERMINAL - {"Completed"}):
        return "skip"
    return "start" if states <= {"Completed"} else None


_OUTPUTS = "azureml://datastores/workspaceblobstore/paths/azureml"
_KINDS: Mapping[type[JobBody], Literal["Command", "Pipeline", "Sweep"]] = {
    CommandBody: "Command",
    PipelineBody: "Pipeline",
    SweepBody: "Sweep",
}
_FOLDERS = ("uri_folder", "mltable")


@dataclass(frozen=True)
class Plan:
    """The runs of a submitted job, the outer ones first, and the command jobs and sweeps among them by name."""

    runs: tuple[Run, ...]
    jobs: Mapping[str, CommandJob]
    sweeps: Mapping[str, SweepBody]


@dataclass(frozen=True)
class Planner:
    """Planner of the jobs of a workspace."""

    pools: Mapping[str, Pool]
    address: Callable[[str], str | None]

    def plan(self, first: Run, body: JobBody) -> Plan:
        """Plan a job whose own run is given; the types and addresses of outputs are written to its runs.

        Raises:
            UsageError: the job cannot be run here, such as for want of a compute, or its steps do not fit together.
        """
        return _Job(self, first, body).plan()

    def plan_trial(self, sweep: Run, body: SweepBody, number: int, values: Mapping[str, str]) -> Plan:
        """Plan a trial of a sweep with its values of the search space."""
        trial = replace(body.trial, command=with_values(body.trial.command, values))
        name = f"{sweep.name}_{number}"
        run = _run_within(sweep, number, name, trial, name)
        run.trial = dict(values)
        run.body |= {
            "tags": {"hyperparameters": json.dumps(run.trial)},
            "environmentId": (sweep.body.get("trial") or {}).get("environmentId"),
            "codeId": _id(trial.code),
        }
        return _Job(self, run, trial).plan()


class _Job:
    """A submitted job while it is planned: its runs and bodies by path."""

    def __init__(self, planner: Planner, first: Run, body: JobBody) -> None:
        self._planner = planner
        self._runs: dict[tuple[str, ...], Run] = {}
        self._bodies: dict[tuple[str, ...], JobBody] = {}
        self._add((), first, body)

    def _add(self, path: tuple[str, ...], run: Run, body: JobBody) -> None:
        self._runs[path], self._bodies[path] = run, body
        if isinstance(body, PipelineBody):
            for number, (label, step) in enumerate(body.steps.items()):
                name = f"{run.root}-{label}-{secrets.token_hex(4)}"
                self._add((*path, label), _run_within(run, number, label, step, name), step)

    def plan(self) -> Plan:
        for path, run in self._runs.items():
            for name, output in self._bodies[path].outputs.items():
                uri = self._uri(Reference(path, name))
                locate(uri, self._planner.address)  # an address of another workspace is refused here
                run.outputs[name] = (output.type, uri)
        jobs, sweeps = {}, {}
        for path, run in self._runs.items():
            body = self._bodies[path]
            if isinstance(body, CommandBody):
                jobs[run.name] = self._command(run, body)
            elif isinstance(body, SweepBody):
                trial = self._command(run, body.trial).body
                # A trial writes to a place of its own, from which the best one's outputs become the sweep's.
                own = {name: replace(output, reference=None) for name, output in trial.outputs.items()}
                sweeps[run.name] = replace(body, trial=replace(trial, outputs=own))
        self._check_order()
        return Plan(tuple(self._runs.values()), jobs, sweeps)

    def _check_order(self) -> None:
        """Refuse steps that wait for each other; a pipeline is over when its steps are."""
        labels = {run.name: ".".join(run.path) or run.name for run in self._runs.values()}
        waits = {labels[run.name]: {labels[name] for name in run.reads} for run in self._runs.values()}
        for run in self._runs.values():
            if run.parent in labels:
                waits[labels[run.parent]].add(labels[run.name])
        try:
            TopologicalSorter(waits).prepare()
        except CycleError as error:
            raise UsageError(
                f"Steps of the pipeline wait for each other: {' reads '.join(reversed(error.args[1]))}. Remove one of "
                "these bindings."
            ) from error

    def _command(self, run: Run, body: CommandBody) -> CommandJob:
        pool = self._planner.pools.get(body.compute)
        if pool is None:
            raise UsageError(f"The local workspace has no compute {body.compute!r}. Give it one by pools= or --pool.")
        if body.nodes > pool.nodes:
            raise UsageError(
                f"The job requests {body.nodes} nodes at once, above the limit of {pool.nodes} of the compute "
                f"{body.compute!r}; it would wait for ever. Give the pool more nodes, or the job fewer."
            )
        inputs: dict[str, InputBody] = {}
        reads = set()
        for name, value in body.inputs.items():
            if value.reference is None:
                inputs[name] = value
                continue
            self._check_source(value.reference, run, name)
            reads |= self._writers(value.reference)
            inputs[name] = replace(value, uri=self._uri(value.reference), reference=None)
        run.reads = frozenset(reads)
        address = self._planner.address
        return CommandJob(
            run,
            replace(body, inputs=inputs),
            None if body.code is None else locate(body.code, address),
            {name: locate(value.uri, address) for name, value in inputs.items() if value.uri is not None},
            {name: locate(uri, address) for name, (_, uri) in run.outputs.items()},
        )

    def _writers(self, reference: Reference) -> set[str]:
        """Return the runs that an output comes from: a pipeline, and the steps in it that write it for the pipeline.

        Whether Azure ML waits for the other steps of such a pipeline is not known, so that what runs here is ready for
        both.
        """
        bound = [
            Reference(path, name)
            for path, body in self._bodies.items()
            for name, output in body.outputs.items()
            if output.reference == reference
        ]
        return {self._runs[reference.path].name}.union(*(self._writers(each) for each in bound))

    def _check_source(self, reference: Reference, reader: Run, name: str) -> None:
        body = self._bodies.get(reference.path)
        if body is None:
            there = [path[-1] for path in self._runs if path[:-1] == reference.path[:-1] and path]
            raise UsageError(
                f"The input {name!r} of the step {'.'.join(reader.path)!r} is bound to the step "
                f"{reference.path[-1]!r}, which is not in its pipeline. It has: {', '.join(there)}."
            )
        if reference.name not in body.outputs:
            raise UsageError(
                f"The input {name!r} of the step {'.'.join(reader.path)!r} is bound to the output {reference.name!r} "
                f"of {'.'.join(reference.path)!r}, which has: {', '.join(sorted(body.outputs)) or 'no outputs'}."
            )

    def _uri(self, reference: Reference) -> str:
        output: OutputBody = self._bodies[reference.path].outputs[reference.name]
        if output.reference is not None:
            return self._uri(output.reference)
        if output.uri is not None:
            return output.uri
        end = "/" if output.type in _FOLDERS else ""
        return f"{_OUTPUTS}/{self._runs[reference.path].name}/{reference.name}{end}"


def _run_within(whole: Run, number: int, label: str, body: JobBody, name: str) -> Run:
    document = _document(whole, label, body)
    path = (*whole.path, label)
    kind, experiment = _KINDS[type(body)], whole.experiment
    return Run(name, kind, label, experiment, document, whole.name, number, root=whole.root, path=path)


def _document(whole: Run, label: str, body: JobBody) -> dict[str, Any]:
    own: dict[str, Any]
    if isinstance(body, CommandBody):
        own = {
            "command": body.command,
            "computeId": f"azureml:{body.compute}",
            "environmentVariables": dict(body.environment_variables),
            "resources": {"instanceCount": body.nodes},
        }
    elif isinstance(body, SweepBody):
        own = {
            "computeId": f"azureml:{body.trial.compute}",
            "trial": {"command": body.trial.command, "codeId": _id(body.trial.code)},
            "searchSpace": {name: [each.type, list(each.arguments)] for name, each in body.space.expressions.items()},
            "samplingAlgorithm": {"samplingAlgorithmType": body.space.sampling.capitalize()},
            "objective": {"goal": "maximize" if body.maximize else "minimize", "primaryMetric": body.metric},
            "limits": {"maxTotalTrials": body.most_trials, "maxConcurrentTrials": body.most_at_once},
        }
    else:
        # The settings of the submitted pipeline hold for all in it.
        own = {"settings": whole.body.get("settings")}
    empty: dict[str, Any] = {field: {} for field in ("inputs", "outputs", "properties", "tags")}
    return {"jobType": _KINDS[type(body)], "displayName": label, "experimentName": whole.experiment, **own, **empty}


def _id(resource: str | None) -> str | None:
    """Return an id as jobs have it; components have a scheme before it."""
    return None if resource is None else resource.removeprefix("azureml:")
