"""The parts of a session: made here, in the order in which they need each other.

A script drives them by :class:`~azureml_elastic.train.session.session.Session`, a training stack's integration by
:class:`~azureml_elastic.train.session.stack_session.StackSession`. Both are interfaces alone.
"""

from __future__ import annotations

import logging
import socket
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.data import DataLoader, IterableDataset

from azureml_elastic.checkpoint.load.selection import EarlierCheckpoint
from azureml_elastic.checkpoint.state.deepspeed_engine import is_engine
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.locations import open_storage
from azureml_elastic.checkpoint_reference import Reference
from azureml_elastic.config import BatchPolicy, CheckpointPolicy, FixedGlobalBatch, FixedPerWorkerBatch, Plan, Profile
from azureml_elastic.distributed.device import device_of
from azureml_elastic.distributed.process import WorkerSettings, pick_device, trace_folder
from azureml_elastic.distributed.process_groups import ReplicaGroup
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.errors import UsageError
from azureml_elastic.ipc.agent_interface import Agent
from azureml_elastic.plurals import counted
from azureml_elastic.train.agent_client.channel import ChannelAgent
from azureml_elastic.train.agent_client.stack_dump import register_stack_dump
from azureml_elastic.train.agent_client.standalone import StandaloneAgent
from azureml_elastic.train.data.drawn_order import DrawnOrder
from azureml_elastic.train.data.loader import ElasticLoader, LoaderContext
from azureml_elastic.train.data.map_loader import MapLoader, SizedDataset, WindowLoader
from azureml_elastic.train.data.position import Batching, Position
from azureml_elastic.train.data.sampling import DataSpec
from azureml_elastic.train.data.shard_loader import ShardedDataset, ShardLoader, ShardSpec
from azureml_elastic.train.optim.gradients import Gradients, require_averaging
from azureml_elastic.train.optim.learning_rate import LearningRate, Schedule
from azureml_elastic.train.session.exit_hooks import ExitHooks, all_arrive
from azureml_elastic.train.session.process_group_lifecycle import ProcessGroupLifecycle
from azureml_elastic.train.session.records import Audit, Profiling
from azureml_elastic.train.session.steps import Steps
from azureml_elastic.train.session.training_state import SessionContext
from azureml_elastic.train.step_state import StepMachine

_LOG = logging.getLogger(__name__)

_CLOSING_SECONDS = 5.0
"""Time that a script which has failed waits for the checkpoint that is being written."""

_LEAVING_SECONDS = 15.0
"""Time that a script which ends before its last epoch waits for all ranks to do the same."""

_runs: WeakSet[Run] = WeakSet()


def _mesh_shape(
    ranks_per_node: Sequence[int], nodes_per_replica: int | Literal["all"], tensor_parallel: int
) -> tuple[int, int]:
    """Return the numbers of replicas of a round and of the parts of each, for the nodes in the order of ranks.

    Ranks are numbered node by node, and the nodes of a replica follow each other, so that the mesh of a round needs no
    more than its shape: a replica is a row, and the ranks that compute one layer together are neighbours on a node.

    Raises:
        UsageError: the ranks cannot be divided so.
    """
    each, world_size = ranks_per_node[0], sum(ranks_per_node)
    if len({*ranks_per_node}) > 1:
        raise UsageError(
            f"run.mesh() needs the same number of workers on each node, but the nodes of this round have "
            f"{', '.join(map(str, ranks_per_node))}. Give a number for process_count_per_instance."
        )
    if tensor_parallel < 1 or each % tensor_parallel:
        raise UsageError(
            f"tensor_parallel={tensor_parallel} does not divide the {counted(each, 'worker')} of a node. Give a "
            "divisor: layers are computed by workers of one node."
        )
    size = world_size if nodes_per_replica == "all" else nodes_per_replica * each
    if world_size % size:
        raise UsageError(
            f"The {counted(world_size, 'worker')} of this round are no whole replicas of {size}: "
            f"nodes_per_replica={nodes_per_replica} of {counted(each, 'worker')} each. Start the run with a number "
            "of nodes that nodes_per_replica divides."
        )
    return world_size // size, size // tensor_parallel


class Run:
    """The parts of one process of an elastic run, and what takes several of them."""

    def __init__(self, context: SessionContext) -> None:
        self.context = context
        self.machine = StepMachine()
        self.position = Position(context.identity)
        self.batching = Batching(context.batch)
        self.rate = LearningRate(context.batch, self.position, self.machine)
        self.lifecycle = ProcessGroupLifecycle(context, self.machine, self.position, self.rate)
        self.state = self.lifecycle.state
        self.gradients = Gradients(self.lifecycle.world, self.position, self.rate, exact=self.batching.exact)
        self.steps = Steps(context, self.machine, self.lifecycle, self.rate, self.gradients)
        self._not_averaged: list[nn.Module] = []
        self._mesh: DeviceMesh | None = None
        self._replica: ReplicaGroup | None = None
        self.exit_hooks = ExitHooks(self._finish_at_exit, self._close_at_exit, self.lifecycle.on_uncaught)

    def leave_gradients_to_script(self, *modules: nn.Module) -> None:
        """Accept modules at any world size whose gradients the script, or its stack, averages by itself."""
        self._not_averaged += modules

    def mesh(self, tensor_parallel: int) -> DeviceMesh:
        """Return the device mesh of the round, see :meth:`Session.mesh`."""
        if self._mesh is not None or self.position.loaders or self.state.tracked is not None:
            raise UsageError("run.mesh() is called once, before run.loader() and run.track(): they depend on it.")
        lifecycle, identity = self.lifecycle, self.lifecycle.world.identity
        with lifecycle.guard(stay=False):
            # The first rank of each node, as many times as the node has ranks.
            firsts = lifecycle.world.control.gather(identity.rank - identity.local_rank)
            ranks_per_node = [*Counter(firsts).values()]
            replicas, shards = _mesh_shape(ranks_per_node, self.context.nodes_per_replica, tensor_parallel)
            sizes = {"replicate": replicas, "shard": shards, "tensor": tensor_parallel}
            if tensor_parallel == 1:
                del sizes["tensor"]
            kind = device_of(lifecycle.device).kind
            self._mesh = init_device_mesh(kind, (*sizes.values(),), mesh_dim_names=(*sizes,))
            size = shards * tensor_parallel
            if replicas > 1 and size > 1:
                rows = [range(begin, begin + size) for begin in range(0, replicas * size, size)]
                self._replica = ReplicaGroup(lifecycle.world, rows)
        if tensor_parallel > 1:
            rank, world_size = identity.rank // tensor_parallel, identity.world_size // tensor_parallel
            self.position.identity = replace(identity, rank=rank, world_size=world_size)
            self.position.counts = identity.rank % tensor_parallel == 0
            if not self.position.counts:
                self.context.audit.close()  # the first of these ranks records the samples of all
        return self._mesh

    def loader(
        self,
        dataset: SizedDataset | ShardedDataset,
        name: str,
        batching: Batching,
        order: Mapping[str, Any],
        options: Mapping[str, Any],
        loader_class: type[DataLoader[Any]] = DataLoader,
        drawn: DrawnOrder | None = None,
    ) -> ElasticLoader:
        """Return a loader from the position in the data, see :meth:`Session.loader`.

        Args:
            order: ``global_batch_size``, ``seed``, ``shuffle`` and ``drop_last``, which stay the same over all restarts
            options: further arguments of ``loader_class``
            drawn: order of a sampler, in place of that of the seed
        """
        position, size = self.position, order["global_batch_size"]
        batching.require_fitting(size)
        if batching.exact and position.loaders:
            raise UsageError('reduce="exact" works with one training loader; take reduce="allreduce" for several.')
        context = LoaderContext(position, self.lifecycle.device, batching, loader_class, options, self.steps)
        if not isinstance(dataset, IterableDataset) and isinstance(dataset, SizedDataset):
            kind = WindowLoader if batching.equal_counts else MapLoader
            spec = DataSpec(len(dataset), **order) if drawn is None else DataSpec(drawn.length, drawn.name, **order)
            return kind(dataset, position.add(name, spec), context, drawn)
        if not isinstance(dataset, ShardedDataset):
            raise UsageError(
                f"{type(dataset).__name__} has neither a length and samples by index, nor num_shards and shard(), so "
                "it cannot be divided among ranks. Wrap its items: train.Shards(paths, read_one)."
            )
        if batching.micro_batch_size is not None or batching.micro_batches is not None:
            raise UsageError(
                "micro_batch_size and micro_batches do not go with shards; give the policy logical_workers for smaller "
                "batches."
            )
        smallest = batching.window_size(size, 1)
        shards = ShardSpec.make(dataset.num_shards, batching.logical_workers, smallest_window=smallest, **order)
        return ShardLoader(dataset, position.add(name, shards), context, self.steps.add_up)

    def track(self, objects: Mapping[str, Any], partial: Collection[str] = ()) -> int:
        """Track objects and restore them, see :meth:`Session.track`."""
        if self.state.tracked is not None:
            names = self.state.tracked.names
            raise UsageError(f"run.track() was called before, with {names}. Give all objects in one call.")
        world_size = self.lifecycle.world.identity.world_size
        if (world_size > 1 or self.context.can_grow) and not self.batching.exact:
            require_averaging(objects, self._not_averaged, world_size)
        if unknown := sorted(set(partial) - objects.keys()):
            raise UsageError(f"partial={unknown} is not among the tracked objects {sorted(objects)}. Give their names.")
        found = self.state.found
        tracked = TrackedState(dict(objects), partial, found)
        if not any(map(is_engine, objects.values())):  # whose state is in partitions
            found.attach(tracked)
        elif self.lifecycle.world.identity.rank == 0:
            _LOG.warning(
                "What the script keeps beside a DeepSpeed engine is not looked for: what is not tracked, such as an "
                "average of the weights or a queue, begins anew in new processes."
            )
        if isinstance(self.context.batch, FixedPerWorkerBatch) and any(
            not isinstance(scheduler, Schedule) for scheduler in tracked.schedulers_of_engines
        ):
            raise UsageError(
                "The DeepSpeed engine has a scheduler that counts steps, but the samples of a step depend on the world "
                "size. Leave it out of the configuration: deepspeed.initialize(lr_scheduler=run.schedule(scheduler))."
            )
        self.gradients.attach(tracked)
        # Hooks run in this order. The guard comes before the hook that scales the learning rate: a state that it hands
        # over has the script's own rate.
        self.lifecycle.guard_updates(tracked)
        self.rate.attach(tracked.optimizers)
        with self.lifecycle.guard(stay=False):
            self.state.track(tracked)
            self.lifecycle.settle_weights()
        if self.context.profiling is not None:
            self.context.profiling.between_steps(self.lifecycle.world.identity, self.state.steps)
        if self._replica is not None and not tracked.replicated:
            # The last of the hooks: a rank knows by the others that its own gradients are complete before it says so.
            for optimizer in tracked.optimizers:
                optimizer.register_step_pre_hook(self._before_update)
        self.lifecycle.follow_updates(tracked)
        return self.state.steps

    def close(self) -> None:
        """Release the process group and the agent, also of a session that has not ended well."""
        self.exit_hooks.cancel()
        if self.context.profiling is not None:
            self.context.profiling.close()
        if not self.machine.over:
            self.steps.values.send(wait=False)
            self.state.settle(_CLOSING_SECONDS)
        self.context.agent.close()
        self.context.audit.close()
        world = self.lifecycle.world
        # Closing a group with a dead peer could block, and of a process that only makes room others wait for the end.
        if world.owns_group and not (self.exit_hooks.failed or self.lifecycle.exits_quickly):
            world.close()

    def _before_update(self, *_: object) -> None:
        """Update a sharded model only where the whole replica does, so that what is left of it is of one step."""
        first = self.machine.first_update(has_loader=bool(self.position.loaders))
        if self._replica is not None and first and self.state.tracked is not None:
            self._replica.agree()

    def _finish_at_exit(self) -> None:
        """Finish a script that has ended; one that ends before its last epoch may be failing on this rank alone."""
        steps, identity = self.steps, self.lifecycle.world.identity
        if self.machine.over:
            return
        if steps.complete_loop is not None:
            steps.complete_loop()
        if not (steps.trained_out or self.state.tracked is not None):
            return
        # Ranks that are at different steps, or not all between two steps, must not count for each other: finish() is a
        # collective, and would save a mixture, or wait for its timeout.
        key = f"azureml_elastic/left/{identity.round}/{self.state.steps}/{not self.machine.whole}"
        if steps.trained_out or all_arrive(key, identity.world_size, _LEAVING_SECONDS):
            steps.finish()
        elif self.state.has_unsaved_progress():
            _LOG.warning(
                "The script ends after step %d, before its last epoch, and not all ranks ended within %g s: its "
                "last steps are not saved. Call run.finish() on all ranks before a script ends early.",
                self.state.steps,
                _LEAVING_SECONDS,
            )

    def _close_at_exit(self) -> None:
        self.close()
        if not self.lifecycle.exits_quickly:
            for model in self.lifecycle.models:
                model.dissolve()  # its threads must not outlive the interpreter


class RunMember:
    """What a script and the integration of a training stack ask alike of the run that their process is part of."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lifecycle = run.lifecycle
        self._steps = run.steps

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the run has completed, over all rounds."""
        return self._run.state.steps

    @property
    def device(self) -> torch.device:
        """Device of this process."""
        return self._lifecycle.device

    @property
    def rank(self) -> int:
        """Rank among all processes of the round."""
        return self._lifecycle.world.identity.rank

    @property
    def world_size(self) -> int:
        """Number of processes of the round."""
        return self._lifecycle.world.identity.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def epoch(self) -> int:
        """Current epoch, counted from 0."""
        return max(self._run.position.epochs)


def open_run(
    checkpoint: CheckpointPolicy | None = None,
    *,
    batch: BatchPolicy | None = None,
    profile: Profile | None = None,
    audit: bool | None = None,
) -> Run:
    """Return the parts of a session; see :func:`~azureml_elastic.train.start`."""
    environment = WorkerEnvironment.read()
    settings = WorkerSettings.of(environment)
    plan, identity = settings.plan, settings.identity
    policy = settings.policy(checkpoint)
    assert policy.path is not None
    storage = open_storage(policy.path)
    storage.prepare()  # before the process group: a rank that fails here keeps no other waiting
    agent: Agent
    if environment.channel is None:
        agent = StandaloneAgent(storage, identity)
    else:
        register_stack_dump(Path(environment.channel).parent, identity)
        agent = ChannelAgent(environment.channel, identity, stays=settings.stays)
    audited = audit if audit is not None else plan is not None and plan.audit
    profile = profile or (plan.profile if plan is not None else None)
    profiling = None
    if profile:
        folder, node = trace_folder(profile.folder, environment), environment.node or socket.gethostname()
        profiling = Profiling(profile, folder, node, pick_device(identity), agent)
    run = Run(
        SessionContext(
            identity,
            agent,
            storage,
            policy,
            batch=batch or (plan.batch if plan else FixedGlobalBatch()),
            audit=Audit(Path(environment.run_dir or ".") if audited else None),
            profiling=profiling,
            can_grow=environment.channel is not None and settings.max_world_size > 1,
            nodes_per_replica=1 if plan is None else plan.distribution.nodes_per_replica,
            earlier=earlier_checkpoint(plan),
        )
    )
    _runs.add(run)
    return run


def earlier_checkpoint(plan: Plan | None) -> EarlierCheckpoint | None:
    """Return the checkpoint of the run that this run continues, as the agent has found it."""
    run = None if plan is None else plan.resume_from
    if run is None or run.path is None or run.checkpoint is None:
        return None
    return EarlierCheckpoint(open_storage(run.path), Reference.from_json(run.checkpoint))


def has_run() -> bool:
    """Return whether this process has a session that is not over."""
    return any(not run.machine.over for run in _runs)
