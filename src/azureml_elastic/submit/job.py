"""``ElasticCommandJob``: a frozen model that compiles to entities of azure-ai-ml."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, overload

from typing_extensions import Self

from azureml_elastic.config.distribution import ElasticDistribution
from azureml_elastic.config.resources import ElasticResources
from azureml_elastic.submit.bindings import bindings_of, has_search
from azureml_elastic.submit.conversion import fields_of, is_sweep, trial_of
from azureml_elastic.submit.display import as_html, as_line, as_text
from azureml_elastic.submit.fields import JobFields, given_fields, merged_fields
from azureml_elastic.submit.sdk_hooks import Submittable, outside_pipelines, position_in_pipelines

if TYPE_CHECKING:
    from azure.ai.ml.entities import Command, CommandJob, Pipeline, PipelineJob, Sweep
    from azure.ai.ml.sweep import SweepJob


class ElasticCommandJob(JobFields, Submittable):  # type: ignore[misc]  # its mappings are read only
    """An Azure ML command job that starts with few nodes, grows, and survives the loss of any node.

    The fields match those of ``azure.ai.ml.command()``; objects of azure-ai-ml are kept as given and never modified.
    A job can be submitted repeatedly; each submission is a separate run.

    Args:
        command: shell commands of which exactly one starts a Python program, as in
            ``"pip install -r requirements.txt && python train.py --data ${{inputs.data}}"``.
        environment: name of a registered environment, or an ``Environment``.
        resources: number and kind of the nodes. Optional with node pools, which then provide the limits: the sum of
            their minimums, at least one, and the sum of their maximums.
        code: local folder with the script, or a remote location that azure-ai-ml supports.
        compute: name of a cluster; ``None`` for serverless compute, whose VM size Azure ML chooses unless
            ``resources`` has an ``instance_type``; or :class:`NodePool` objects in the order of
            preference, as in ``[NodePool("spot", max_instance_count=6), NodePool("dedicated", max_instance_count=2)]``.
        inputs: literals, ``Input`` objects, or dictionaries of their fields.
        outputs: ``Output`` objects or dictionaries of their fields, which all nodes write together.
        environment_variables: environment variables of every process of the job.
        distribution: configuration of the processes on the nodes.
        checkpoint: checkpoint policy. Without a path, checkpoints are stored in the workspace's default blob store.
        batch: policy for batch size and learning rate when the world size changes.
        preemption: detection of and response to preemption notices.
        health: checks of nodes before they join, detection of hangs, and quarantine of hosts with repeated failures.
        rendezvous: table through which the nodes find each other.
        replacement: policy for replacing lost nodes; ``None`` disables replacement.
        metrics: where what the script logs and the metrics of the run are published.
        profile: steps and ranks that PyTorch's profiler records; ``None`` disables it.
        audit: whether workers record the samples of each step.
        resume_from: name of an earlier run, such as a failed one, from whose last committed checkpoint this run starts;
            its own checkpoints have a place of their own. Both runs need the same checkpoint path.
        presets: network, mount and data settings, which the job's own settings override.
        name: name of the run; ``None`` generates a new one for each submission.
        display_name: display name of the run in the studio.
        experiment_name: name of the experiment; ``None`` selects the name of the current folder, as azure-ai-ml does.
        description: description of the run.
        tags: tags of the run.
        properties: properties of the run.
        identity: identity with which the nodes access data and the table, such as ``UserIdentityConfiguration``.
        timeout: running time after which Azure ML cancels a node's job.
        services: interactive services by name, such as ``JupyterLabJobService``. With the placement ``fan_out`` every
            node has its own; TensorBoard runs on node 0 unless it has ``nodes="all"``.
        job_tier: tier of serverless compute: ``"Spot"``, ``"Basic"``, ``"Standard"`` or ``"Premium"``.
        priority: priority in the queue of the compute.
        parent_job_name: name of the job that Azure ML shows as the parent; not supported with ``fan_out``.
        delivery: ``"ship"`` uploads this library with the job and installs missing dependencies on the nodes;
            ``"environment"`` uses the library that the environment provides.
    """

    @overload
    @classmethod
    def from_command(
        cls,
        command_job: Command | CommandJob,
        *,
        resources: ElasticResources | Mapping[str, Any] | None = None,
        distribution: ElasticDistribution | Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Self: ...

    @overload
    @classmethod
    def from_command(
        cls,
        command_job: Sweep | SweepJob,
        *,
        resources: ElasticResources | Mapping[str, Any] | None = None,
        distribution: ElasticDistribution | Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Sweep: ...

    @classmethod
    def from_command(
        cls,
        command_job: Command | CommandJob | Sweep | SweepJob,
        *,
        resources: ElasticResources | Mapping[str, Any] | None = None,
        distribution: ElasticDistribution | Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Self | Sweep:
        """Return the elastic equivalent of a command job of azure-ai-ml, which is not modified.

        A launcher in the command (``torchrun``, ``python -m torch.distributed.run``) and a ``PyTorchDistribution``
        are translated to the distribution. Settings without an elastic equivalent are rejected by name.

        Args:
            command_job: result of ``command(...)``, ``command(...).sweep(...)`` or ``load_job("job.yml")``. Of a sweep,
                the result is a sweep whose trials are elastic jobs.
            resources: number and kind of the nodes; fields that are not set (VM size, ``shm_size``, ...) are taken
                from the job. ``None`` turns ``instance_count`` > 1 into 1 to ``instance_count`` nodes.
            distribution: configuration of the processes, replacing that of the job; completed by the options of a
                launcher in the command.
            **changes: fields of the elastic job, overriding those of the given job, such as ``compute``.

        Raises:
            SubmitError: the argument is not a command job, or has a setting without an elastic equivalent.
            CommandError: the command's launcher has options that cannot be translated.
            MissingExtra: azure-ai-ml is not installed.
        """
        if not is_sweep(command_job):
            return cls(**fields_of(command_job, resources, distribution, changes))
        trial = trial_of(command_job)
        return cls(**fields_of(trial.command_job, resources, distribution, changes)).sweep(**trial.options)

    def with_options(self, **changes: Any) -> Self:
        """Return a copy of the job with changed fields, validated like a new job.

        Mappings such as ``environment_variables``, ``inputs`` and ``tags`` are merged with those of the job, and a
        mapping for a field such as ``resources`` or ``checkpoint`` changes the given fields of it alone, as in
        ``job.with_options(resources={"max_instance_count": 8}, tags={"trial": "2"})``. All other values replace those
        of the job. To remove an entry, use :meth:`model_copy`, which replaces whole mappings.

        Raises:
            pydantic.ValidationError: a field is unknown, or its value is invalid.
        """
        return type(self)(**merged_fields(self, changes))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy of the job, in which whole values are replaced; validated like a new job.

        Args:
            update: fields to replace; :meth:`with_options` merges mappings instead.
            deep: whether values are copied, too.

        Raises:
            pydantic.ValidationError: a field is unknown, or its value is invalid.
        """
        made = type(self)(**{**given_fields(self), **update}) if update else self
        return super(ElasticCommandJob, made).model_copy(deep=deep)

    def __call__(self, **inputs: Any) -> Any:
        """Return a copy of the job with other inputs; in a ``@dsl.pipeline`` function, a step of that pipeline.

        A step is a node of azure-ai-ml, with ``inputs`` and ``outputs`` as all nodes have. With the placement
        ``fan_out`` it is a pipeline within the pipeline. Each step is a run of its own.

        With a search expression among the inputs the result is always a copy of the job, of which
        :meth:`sweep` makes a sweep, and in a pipeline a step.

        Args:
            **inputs: values, outputs of other steps, inputs of the pipeline; ``None`` for an optional input that shall
                have no value.

        Raises:
            SubmitError: the job has no input of that name, or fields of the job contradict each other.
            CommandError: the command starts no Python program, or one that is not in ``code``.
            MissingExtra: azure-ai-ml is not installed.
        """
        from azureml_elastic.submit.steps import compile_step, with_inputs

        changed = with_inputs(self, inputs)
        position = position_in_pipelines()
        if position is None or has_search(changed.inputs):
            return changed
        return compile_step(changed, position)

    def __repr__(self) -> str:
        return as_line(self)

    def __str__(self) -> str:
        return as_text(self)

    def _repr_html_(self) -> str:
        return as_html(self)

    def compile(self) -> Command | PipelineJob | Pipeline:
        """Return the job as a new entity of azure-ai-ml, which is in no pipeline.

        ``MLClient`` calls this when the job is submitted. Call it to inspect the result, or to give the node of a job
        with the placement ``gang`` or ``service`` to ``PipelineJob(jobs=...)``. A job with inputs that are bound to
        other steps becomes a node with any placement.

        Raises:
            SubmitError: fields of the job contradict each other.
            CommandError: the command starts no Python program, or one that is not in ``code``.
            MissingExtra: azure-ai-ml is not installed.
        """
        from azureml_elastic.submit.steps import compile_node, compile_step

        if not bindings_of(self.inputs) or has_search(self.inputs):
            return compile_node(self)
        with outside_pipelines():  # of the pipeline that it will be in, the other steps are not known yet
            return compile_step(self, uuid.uuid4().hex)

    def _to_job(self) -> Command | PipelineJob:
        from azureml_elastic.submit.compilation import compile_job

        return compile_job(self)

    def sweep(self, *, search_space: Mapping[str, Any] | None = None, **options: Any) -> Sweep:
        """Return a sweep whose trials are elastic jobs, each a run of its own: a new entity of azure-ai-ml.

        Args:
            search_space: search expressions of ``azure.ai.ml.sweep`` by the name of the input whose value they replace,
                in addition to those among the inputs, as of ``job(lr=Uniform(0.01, 0.1))``.
            **options: keyword arguments of azure-ai-ml's ``Command.sweep``, such as ``primary_metric``, ``goal``,
                ``sampling_algorithm`` and ``max_total_trials``.

        Raises:
            SubmitError: the job cannot be a trial, such as one whose placement is ``fan_out``.
            CommandError: the command starts no Python program, or one that is not in ``code``.
            MissingExtra: azure-ai-ml is not installed.
        """
        from azureml_elastic.submit.steps import compile_sweep

        return compile_sweep(self, search_space or {}, options)
