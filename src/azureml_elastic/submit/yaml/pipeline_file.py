"""Files of pipelines: a standard pipeline job, whose command steps may each have an ``elastic:`` block.

azure-ai-ml loads the file without the blocks. Each step that has one is then replaced by the nodes that its elastic job
compiles to. The first of them has the name of the step and its outputs, so that other steps find these where they were.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.bindings import Bound
from azureml_elastic.submit.sdk_hooks import is_binding, plain_command_job, value_of
from azureml_elastic.submit.yaml.elastic_block import BLOCK, read_block
from azureml_elastic.submit.yaml.job_file import PIPELINE, converted, load_plain, loaded_file, without_block
from azureml_elastic.submit.yaml.yaml_terms import translated_errors

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command, PipelineJob


@dataclass(frozen=True)
class ElasticPipeline:
    """A pipeline of a file.

    Args:
        document: content of the file, without the blocks.
        steps: names of the nodes that stand for each elastic step.
        ships: whether a step needs this library's copy.
    """

    job: PipelineJob
    document: Mapping[str, Any]
    steps: Mapping[str, tuple[str, ...]]
    ships: bool


def load_elastic_pipeline(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> PipelineJob:
    """Load a pipeline from a YAML file: a standard pipeline job, whose command steps may have an ``elastic:`` block.

    Each elastic step is a run of its own. Otherwise as :func:`load_elastic_job`, also in its errors.

    Args:
        overrides: values to set first, each as ``a.b=c``, such as ``jobs.train.elastic.max_instance_count=12``.
    """
    return loaded_file(path, overrides, read_pipeline).job


def read_pipeline(document: Mapping[str, Any], file: Path) -> ElasticPipeline:
    """Return the pipeline of a file's content; for the exceptions see :func:`load_elastic_pipeline`."""
    kind = document.get("type", "command")
    if kind != PIPELINE:
        raise SubmitError(f"type is {kind!r}, and no pipeline. Load it by load_elastic_job() or load_elastic_sweep().")
    steps = document.get("jobs")
    if not isinstance(steps, dict):
        raise SubmitError("jobs is no block. Write the steps of the pipeline in it, each by its name.")
    blocks = {name: step[BLOCK] for name, step in steps.items() if isinstance(step, dict) and BLOCK in step}
    if BLOCK in document or not blocks:
        first = next((name for name, step in steps.items() if _kind(step) == "command"), "train")
        raise SubmitError(
            f"{f'{BLOCK} belongs in a step' if BLOCK in document else f'no step has an {BLOCK}: block'}, as "
            f"jobs.{first}.{BLOCK}, such as\njobs:\n  {first}:\n    {BLOCK}:\n      max_instance_count: 4"
        )
    for name, block in blocks.items():
        if _kind(steps[name]) != "command":
            raise SubmitError(
                f"jobs.{name}.type is {_kind(steps[name])!r}, but in a file only steps of 'type: command' are elastic. "
                f"Leave out jobs.{name}.{BLOCK}, or call the job in a @dsl.pipeline function, which takes sweeps, too."
            )
        read_block(block, f"jobs.{name}.")
    plain = {
        **document,
        "jobs": {name: without_block(step) if name in blocks else step for name, step in steps.items()},
    }
    return _with_nodes(_loaded(plain, file), plain, blocks)


def _loaded(document: Mapping[str, Any], file: Path) -> Any:
    """Load a pipeline without blocks by azure-ai-ml, which says of a step that it cannot read: "component: missing"."""
    try:
        return load_plain(document, file)
    except SubmitError as error:
        faults = []
        for name, step in document["jobs"].items():
            if f"jobs.{name}.component: Missing" in str(error) and _kind(step) == "command":
                alone = {key: value for key, value in step.items() if key not in ("inputs", "outputs")}
                try:
                    load_plain({**alone, "type": "command"}, file, f"jobs.{name}.")
                except SubmitError as why:
                    faults.append(str(why))
        if not faults:
            raise
    raise SubmitError(" ".join(faults))


def _kind(step: Any) -> str:
    return str(step.get("type") or "command") if isinstance(step, dict) else ""


def _with_nodes(pipeline: PipelineJob, document: dict[str, Any], blocks: Mapping[str, Any]) -> ElasticPipeline:
    loaded: dict[str, Any] = dict(pipeline.jobs)
    nodes: dict[str, Any] = {}
    steps: dict[str, tuple[str, ...]] = {}
    ships = False
    for name, step in loaded.items():
        made: dict[str, Any] = {name: step}
        if name in blocks:
            with translated_errors(f"jobs.{name}."):
                made, shipped = _nodes_of_step(name, step, document["jobs"][name], blocks[name])
            steps[name], ships = tuple(made), ships or shipped
        taken = sorted(made.keys() & (nodes.keys() | loaded.keys() - {name}))
        if taken:
            raise SubmitError(
                f"jobs.{taken[0]} has the name of a node of the elastic step {name!r}. Rename one of them."
            )
        nodes |= made
    pipeline.jobs.clear()
    pipeline.jobs.update(nodes)
    settings = document.get("settings") or {}
    if any(len(each) > 1 for each in steps.values()) and settings.get("continue_on_step_failure") is None:
        # A node that is lost is a failed step, which ends all other nodes by default.
        document = {**document, "settings": {**settings, "continue_on_step_failure": True}}
        if pipeline.settings is not None:
            pipeline.settings.continue_on_step_failure = True
    return ElasticPipeline(pipeline, document, steps, ships)


def _nodes_of_step(name: str, step: Any, document: Mapping[str, Any], block: Any) -> tuple[dict[str, Any], bool]:
    from azure.ai.ml import Output

    from azureml_elastic.submit.compilation import outputs_of
    from azureml_elastic.submit.steps import compile_step

    where = f"jobs.{name}."
    if isinstance(step.component, str):
        raise SubmitError(
            f"{where}component is the registered component {step.component!r}, whose command is unknown here. Give the "
            f"component's file, as in 'component: ./{name}.yml', or write command, code and environment in the step."
        )
    plain = plain_command_job(step)
    bound = {key: value for key, value in (plain.outputs or {}).items() if is_binding(_text(value))}
    outputs: dict[str, Any] = {key: value for key, value in (plain.outputs or {}).items() if key not in bound}
    for key, declared in step.component.outputs.items():
        outputs.setdefault(key, {"type": declared.type, **({"mode": mode} if (mode := _mode(bound.get(key))) else {})})
    standard = {"resources": vars(step.component).get("resources"), **document}
    job = converted(standard, block, lambda: step, where, outputs=outputs)
    job = job.with_options(inputs=dict(_bound_inputs(step, plain)))
    made: Any = compile_step(job, name)
    nodes: dict[str, Any] = {name: made}
    if hasattr(made.component, "jobs"):
        nodes = dict(_flat(name, made))
        bound = {**{key: output or Output() for key, output in outputs_of(job).items() if key in outputs}, **bound}
    for key, value in bound.items():
        setattr(nodes[name].outputs, key, value)
    return nodes, job.delivery == "ship"


def _flat(name: str, step: Any) -> Iterator[tuple[str, Command]]:
    """Yield the nodes of a pipeline within the pipeline as nodes of the latter: a file has no pipelines within it."""
    for number, (child, node) in enumerate(step.component.jobs.items()):
        for key in node.inputs:
            setattr(node.inputs, key, value_of(step.inputs[key]))
        node.name = name if number == 0 else f"{name}_{child}"
        node.display_name = node.name
        yield node.name, node


def _bound_inputs(step: Any, plain: Any) -> Iterator[tuple[str, Bound]]:
    """Yield the inputs of a step that are outputs of others or inputs of the pipeline, with their declared types."""
    for key, value in (plain.inputs or {}).items():
        text = _text(value)
        if is_binding(text):
            declared = step.component.inputs[key]
            yield key, Bound(text, declared.type, _mode(value) or declared.mode)


def _text(value: Any) -> Any:
    return value if isinstance(value, str) else getattr(value, "path", None)


def _mode(value: Any) -> str | None:
    return getattr(value, "mode", None)
