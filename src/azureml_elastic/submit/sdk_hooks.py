"""The private names of azure-ai-ml that this library uses: to submit and to validate elastic jobs.

``create_or_update`` accepts any ``BaseNode`` and, unless it is a ``Command`` or ``Spark``, submits the result of its
``_to_job()``. ``BaseNode`` is an abstract base class, so an unrelated class can be *registered* with it. The
``_to_job()`` of azure-ai-ml's own ``Command`` reads an existing job. The rest of this library uses public names only;
should a release of azure-ai-ml change these two, ``ml_client.jobs.create_or_update(job.compile())`` still works.
``_to_dict()`` is what the public ``dump()`` writes as text, which takes seconds for many nodes and is only read again.

``jobs.validate`` checks only classes that inherit from a private one, and reports success for all others. The method is
therefore wrapped: an elastic job is compiled, and the result is validated.

Schedules take pipelines alone, and upload what a job needs before they convert the job: an elastic job is compiled
first. A component is refused before azure-ai-ml reads attributes that an elastic job does not have.

Whatever creates a node while a ``@dsl.pipeline`` function runs adds it to that pipeline, also where the node is only
looked at. The stack of the pipelines being built is therefore hidden while an elastic job is compiled or converted.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from azureml_elastic.environment.names import PLAN, STEP
from azureml_elastic.errors import CommandError, SubmitError, needs_extra
from azureml_elastic.submit.client import first_line

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command, CommandComponent, CommandJob, Pipeline, PipelineJob, ValidationResult
    from azure.ai.ml.sweep import SweepJob

_MARK = "_wrapped_for_elastic_jobs"
_BINDING = re.compile(r"\$\{\{\s*parent\..*\}\}")
_SHOWN = ("display_name", "experiment_name", "description", "tags", "properties")
_STEP = "elastic"
"""Name of the step of a pipeline that is scheduled for a single job."""

if TYPE_CHECKING:
    from azure.ai.ml.entities import Job

    class _Base(Job):
        """What an elastic job is registered as, so that the client and schedules take it for type checkers, too."""

        def _to_dict(self) -> dict[str, Any]: ...
        @classmethod
        def _load_from_dict(cls, *_: Any, **__: Any) -> Job: ...
else:
    _Base = ABC


class Submittable(_Base):
    """Base class of jobs that ``MLClient`` compiles before it submits them."""

    @abstractmethod
    def compile(self) -> Command | PipelineJob | Pipeline:
        """Return the job as a new entity of azure-ai-ml."""

    @abstractmethod
    def _to_job(self) -> Command | PipelineJob:
        """Return the entity that ``create_or_update`` submits."""

    def _set_base_path(self, _: object) -> None:
        """Refuse to be a node as it is: ``PipelineJob(jobs=...)`` calls this of each."""
        raise SubmitError(
            "jobs= of a PipelineJob has an elastic job, which is no node of a pipeline. Call the job in a "
            "@dsl.pipeline function, or give what it compiles to, a node with the placement 'gang' or 'service': "
            "job.with_options(resources={'placement': 'gang'}).compile()."
        )


def _builders() -> Any:
    """Return azure-ai-ml's stack of the pipelines whose functions are running; ``None`` if a release has none."""
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml.dsl import _pipeline_component_builder as builder
    return getattr(builder, "_definition_builder_stack", None)


def position_in_pipelines() -> str | None:
    """Return which node the next one is of the pipeline whose function is running; ``None`` outside such functions.

    The text begins with the positions of that pipeline in those around it, so that each node of all of them has another
    one. It is equal whenever the pipeline is built again.
    """
    stack = _builders()
    if stack is None or not stack.items:
        return None
    return "-".join(str(len(builder.nodes)) for builder in stack.items)


def is_binding(value: Any) -> bool:
    """Return whether an input's value is known only when its pipeline runs, such as the output of another step."""
    if isinstance(value, str):  # as in a pipeline that was loaded from YAML
        return _BINDING.fullmatch(value) is not None
    if "azure.ai.ml" not in sys.modules:  # nobody has such an object, and the import takes seconds
        return False
    from azure.ai.ml.entities._builders import BaseNode
    from azure.ai.ml.entities._job.pipeline._io import InputOutputBase, OutputsAttrDict
    from azure.ai.ml.entities._job.pipeline._pipeline_expression import PipelineExpression

    kinds = (InputOutputBase, OutputsAttrDict, PipelineExpression, BaseNode)
    return isinstance(value, kinds) and not isinstance(value, Submittable)


def binding_type(value: Any) -> str | None:
    """Return the type of what an input is bound to, such as ``uri_folder``; ``None`` if it is unknown."""
    outputs = getattr(value, "outputs", value)  # a step stands for its only output
    if isinstance(outputs, Mapping):
        value = next(iter(outputs.values()), None)
    kind = getattr(value, "type", None)
    return kind if isinstance(kind, str) else None


def value_of(held: Any) -> Any:
    """Return what an input of a node of azure-ai-ml was given: a value, an ``Input``, or what it is bound to."""
    return getattr(held, "_data", held)


@contextlib.contextmanager
def outside_pipelines() -> Iterator[None]:
    """Keep nodes that are created meanwhile out of the pipeline whose function is running."""
    stack = _builders()
    if stack is None:
        yield
        return
    held, stack.items = stack.items, []
    try:
        yield
    finally:
        stack.items = held


def register(model: type) -> None:
    """Register a class with ``BaseNode``, so that ``MLClient`` accepts and validates its instances; idempotent."""
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml.entities import JobSchedule
        from azure.ai.ml.entities._builders import BaseNode
        from azure.ai.ml.operations import ComponentOperations, JobOperations, ScheduleOperations
    BaseNode.register(model)
    _before(BaseNode, "_set_referenced_control_flow_node_instance_id", _refuse_in_loop)
    _before(ComponentOperations, "create_or_update", _refuse_component)
    _before(ScheduleOperations, "begin_create_or_update", _make_schedulable)
    _before(JobSchedule, "_to_rest_object", _make_schedulable)
    if not hasattr(JobOperations.validate, _MARK):
        JobOperations.validate = _compiling(JobOperations.validate)  # type: ignore[method-assign]


def _before(owner: type, name: str, act: Callable[..., None]) -> None:
    """Replace a method, if there is one, by one that first calls ``act`` with its object and its arguments."""
    method = getattr(owner, name, None)
    if method is None or hasattr(method, _MARK):
        return

    @functools.wraps(method)
    def wrapper(self: Any, *arguments: Any, **options: Any) -> Any:
        act(self, *arguments, *options.values())
        return method(self, *arguments, **options)

    setattr(wrapper, _MARK, True)
    setattr(owner, name, wrapper)


def _make_schedulable(held_by: Any, *given: Any) -> None:
    """Compile the elastic job of a schedule; a single job becomes the only step of a pipeline.

    azure-ai-ml uploads what a schedule's job needs before it converts the job, and schedules pipelines alone.
    """
    from azure.ai.ml.entities import Command, PipelineJob, PipelineJobSettings

    schedule = next(iter(given), held_by)
    held = getattr(schedule, "create_job", None)
    job = held._to_job() if isinstance(held, Submittable) else held  # noqa: SLF001 - one of our own classes
    # A command without a plan is the user's own, and azure-ai-ml says itself what it thinks of it.
    if isinstance(job, Command) and PLAN in (job.environment_variables or {}):
        shown = {name: getattr(job, name) for name in _SHOWN}
        with outside_pipelines():
            settings = PipelineJobSettings(force_rerun=True)
            job = PipelineJob(jobs={_STEP: job}, compute=job.compute, settings=settings, **shown)
    if job is not held:
        schedule.create_job = job


def _refuse_in_loop(body: Any, *_: Any) -> None:
    """Refuse to repeat nodes whose run has the id of the submitted pipeline and of their step."""
    from azure.ai.ml.entities import Command, Pipeline

    if isinstance(body, Command) and STEP in (body.environment_variables or {}):
        raise SubmitError(
            "The iterations of a loop (do_while, parallel_for) around an elastic step whose nodes are steps themselves "
            "would all be one run, which has its id from the pipeline and the step. Take the placement 'gang', with "
            "which each is a run of its own: job.with_options(resources={'placement': 'gang'})."
        )
    if isinstance(body, Pipeline):
        for node in getattr(body.component, "jobs", {}).values():
            _refuse_in_loop(node)


def _refuse_component(_: Any, component: Any, *__: Any) -> None:
    if isinstance(component, Submittable):
        raise SubmitError(
            "An elastic job cannot be registered as a component, which has neither the number of nodes nor the place "
            "of checkpoints. Register the plain component of the script, and make a job of each call: "
            "ElasticCommandJob.from_command(component(...), resources=ElasticResources(max_instance_count=...))."
        )


def _compiling(validate: Callable[..., ValidationResult]) -> Callable[..., ValidationResult]:
    """Return ``JobOperations.validate`` that compiles an elastic job first; other jobs are passed on as they are."""

    @functools.wraps(validate)
    def wrapper(self: Any, job: Any, *, raise_on_failure: bool = False, **options: Any) -> ValidationResult:
        from azure.ai.ml.exceptions import MlException

        if isinstance(job, Submittable):
            try:
                job = job.compile()
            except (SubmitError, CommandError) as error:
                if raise_on_failure:
                    raise
                return _failed(str(error))
            except MlException as error:
                if raise_on_failure:
                    raise SubmitError(f"azure-ai-ml refuses the job: {first_line(error)}") from error
                return _failed(first_line(error))
            with outside_pipelines():
                return validate(self, job, raise_on_failure=raise_on_failure, **options)
        return validate(self, job, raise_on_failure=raise_on_failure, **options)

    setattr(wrapper, _MARK, True)
    return wrapper


def ignore_file(folder: Path) -> Any:
    """Return azure-ai-ml's reader of the ``.amlignore``, or ``.gitignore``, of a folder."""
    from azure.ai.ml._utils._asset_utils import get_ignore_file

    return get_ignore_file(folder)


def _failed(message: str) -> ValidationResult:
    from azure.ai.ml.entities._validation import ValidationResultBuilder

    return ValidationResultBuilder.from_single_message(message)


def plain_command_job(job: Any) -> CommandJob:
    """Return a command job of azure-ai-ml with plain values, without modifying the given one.

    ``command()`` returns a ``Command``, a pipeline node with bound inputs; a ``CommandJob`` has plain values.

    Raises:
        SubmitError: the argument is something else, a submitted job, or a call of a registered component, whose
            command is not available.
        MissingExtra: azure-ai-ml is not installed.
    """
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml.entities import Command, CommandComponent, CommandJob
    if not isinstance(job, (Command, CommandJob)):
        raise SubmitError(
            f"from_command() got a {type(job).__name__}. Give a command job: what command(...) returns, or "
            "load_job('job.yml') of a file with 'type: command'."
        )
    if job.id is not None:
        raise SubmitError(
            f"The command job {job.name!r} was submitted already and has been rewritten by the service. Give the "
            "original job: what command(...) returned, or load_job('job.yml')."
        )
    if isinstance(job, CommandJob):
        return job
    if not isinstance(job.component, CommandComponent):
        raise SubmitError(
            f"The command job calls the registered component {job.component!r}, whose command is unknown. Load it "
            "with ml_client.components.get(...) and call that, or give command() the command itself."
        )
    with outside_pipelines():
        return job._to_job()  # noqa: SLF001 - no public conversion exists


def plain_sweep_job(job: Any) -> SweepJob:
    """Return a sweep of azure-ai-ml with plain values, without modifying the given one.

    Raises:
        SubmitError: the sweep was submitted already, or has a registered component as its trial.
    """
    from azure.ai.ml.sweep import SweepJob

    if job.id is not None:
        raise SubmitError(
            f"The sweep {job.name!r} was submitted already and has been rewritten by the service. Give the original "
            "one: what .sweep(...) returned, or load_job('sweep.yml')."
        )
    if isinstance(job.trial, str):
        raise SubmitError(
            f"The sweep's trial is the registered component {job.trial!r}, whose command is unknown. Load it with "
            "ml_client.components.get(...) and sweep a call of it, or write the trial's fields."
        )
    if isinstance(job, SweepJob):
        return job
    command = job.trial.command
    try:
        with outside_pipelines():
            return job._to_job()  # type: ignore[no-any-return]  # noqa: SLF001 - no public conversion exists
    finally:
        job.trial.command = command  # the conversion writes the search space into it


def dumped(job: CommandJob | PipelineJob) -> Mapping[str, Any]:
    """Return azure-ai-ml's own document of a job, with some losses; see ``entity_document``."""
    return job._to_dict()  # noqa: SLF001 - see above


def component_of(job: Any) -> CommandComponent | None:
    """Return the component that a node of azure-ai-ml calls, as :func:`plain_command_job` accepts it, or ``None``."""
    from azure.ai.ml.entities import Command, CommandComponent

    component = job.component if isinstance(job, Command) else None
    return component if isinstance(component, CommandComponent) else None


def fields_of_command() -> frozenset[str]:
    """Return the names of the parameters of ``command()`` in the installed azure-ai-ml."""
    with needs_extra("azure-ai-ml", "submit"):
        from azure.ai.ml import command
    fields = inspect.signature(command).parameters.values()
    return frozenset(field.name for field in fields if field.kind is field.KEYWORD_ONLY)
