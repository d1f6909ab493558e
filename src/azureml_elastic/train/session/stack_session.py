"""The session as a training stack's integration sees it: the steps are the stack's, and so is the loop.

This is all of the session that integrations know. The first of them to ask opens it, one in a process.
"""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from wrapt import wrap_function_wrapper

from azureml_elastic.checkpoint.state import tree
from azureml_elastic.checkpoint.state.deepspeed_engine import EngineState, is_engine
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.checkpoint.storage.local import LocalStorage
from azureml_elastic.config import FixedGlobalBatch
from azureml_elastic.distributed.process import WorkerSettings
from azureml_elastic.environment.worker import WorkerEnvironment
from azureml_elastic.ipc.worker_messages import Expects
from azureml_elastic.train.data.drawn_order import DrawnOrder
from azureml_elastic.train.data.map_loader import WindowLoader
from azureml_elastic.train.data.sampling import Cursor
from azureml_elastic.train.session.run import Run, RunMember, has_run, open_run

_LOADER = "train"

_LOG = logging.getLogger(__name__)


class StackSession(RunMember):
    """A session whose steps are those of a training stack.

    Args:
        run: parts of the session
        reference_world_size: number of ranks for which the script's batch sizes are meant; their product with it is the
            global batch size at any world size
    """

    def __init__(self, run: Run, reference_world_size: int) -> None:
        super().__init__(run)
        self.position = run.position
        self._state = run.state
        self.reference_world_size = reference_world_size
        self._shape: tuple[int, int] | None = None

    @property
    def folder(self) -> Path:
        """Folder of this process's node, which is removed with the node, however that ends."""
        channel = WorkerEnvironment.read().channel
        assert channel is not None
        return Path(channel).parent

    @property
    def over(self) -> bool:
        """Whether the session has ended."""
        return self._run.machine.over

    def windows(
        self,
        dataset: Any,
        *,
        batch_size: int,
        accumulation: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = False,
        global_batch_size: int | None = None,
        batches: int | None = None,
        drawn: DrawnOrder | None = None,
        by_epoch: Mapping[int, int] | None = None,
        **options: Any,
    ) -> WindowLoader:
        """Return a loader with equal numbers of batches on all ranks, from the position in the data.

        Args:
            batch_size: samples of a forward pass of a rank, and their limit at any world size without ``batches``
            accumulation: batches of a rank in an optimizer step at the reference world size
            drop_last: whether the incomplete window at the end of an epoch is left out
            global_batch_size: samples of an optimizer step, in place of the product of the others
            batches: number of batches of each rank in an optimizer step, for loops that count them: with fewer ranks
                they are larger
            drawn: order of a sampler, in place of that of the seed
            by_epoch: number of such products of an optimizer step, by the first epoch with this number
            options: further arguments of ``DataLoader``
        """
        if global_batch_size is None:
            global_batch_size = batch_size * accumulation * self.reference_world_size
        batching = replace(
            self._run.batching,
            micro_batch_size=batch_size if batches is None else None,
            micro_batches=batches,
            equal_counts=True,
        )
        order = {"global_batch_size": global_batch_size, "seed": seed, "shuffle": shuffle, "drop_last": drop_last,
                 "accumulation": {str(epoch): number for epoch, number in (by_epoch or {}).items()}}  # fmt: skip
        loader = self._run.loader(dataset, _LOADER, batching, order, options, drawn=drawn)
        assert isinstance(loader, WindowLoader)
        self.position.in_epochs = True  # the stack has the loop over epochs, and end_epoch() ends each
        return loader

    def wait_at_most(self, timeout: timedelta | None) -> None:
        """Have collectives wait for as long as the script wants, whose stack finds the process group open.

        Args:
            timeout: ``None`` for no wish
        """
        if timeout is not None and not self.over:
            self._lifecycle.world.wait_at_most(timeout)

    def drive(self, complete_step: Callable[[], None]) -> None:
        """Have a loop of the script's own say which samples it trains, and count its last step before the end."""
        self._steps.complete_loop = complete_step
        self._state.found.repeated = True

    def leave_data(self) -> None:
        """Give up the loader of :meth:`windows`, before anything of it is trained."""
        self.position.loaders.clear()
        self.position.in_epochs = False
        self._steps.complete_loop = None
        self._state.found.repeated = False

    def record_samples(self) -> None:
        """Record the samples of the current step, which the script trains now."""
        self._steps.record_samples()

    def finish_before_end(self) -> None:
        """Finish where the script ends its process group, unless it is failing, perhaps on this rank alone."""
        error = sys.exc_info()[1]  # also within a finally clause
        if self.trains and (error is None or (isinstance(error, SystemExit) and not error.code)):
            self._steps.finish()

    def save_last(self) -> None:
        """Save what the stack has trained, once it has trained all, unless that is saved. A collective.

        Raises:
            CheckpointError: it cannot be saved.
        """
        if self._state.tracked is not None and not self.over and self._state.has_unsaved_progress():
            self._steps.save(wait=True)

    def find(self, name: str, part: str | None = None) -> Any:
        """Return the state of one object that :meth:`track` will restore, if any. A collective when called first.

        Args:
            part: key of the part of its state to return, in place of the whole: without tensors
        """
        found = (self._found or {}).get(name)
        return None if found is None else tree.join(found if part is None else found[part], {})

    def has_state(self) -> bool:
        """Return whether the run has a state that :meth:`track` will restore. A collective when called first."""
        return self._found is not None

    @cached_property
    def _found(self) -> Mapping[str, Any] | None:
        with self._lifecycle.guard(stay=False):
            return self._state.find()

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value on every rank. A collective."""
        with self._lifecycle.guard(stay=False):
            return self._lifecycle.world.control.from_main(value)

    def replicas_and_shards(self) -> tuple[int, int]:
        """Return the number of replicas of the round, and of the shards of each. A collective when called first.

        Raises:
            UsageError: called first when there is a loader, or the workers cannot be divided so.
        """
        if self._shape is None:
            replicas, shards = self._run.mesh(tensor_parallel=1).shape
            self._shape = replicas, shards
        return self._shape

    def begin_at(self, steps: int, epoch: int, windows: int) -> None:
        """Continue after steps that the script has restored by itself, in a run that has no state yet.

        Args:
            steps: optimizer steps completed
            epoch: epoch of the next one
            windows: number of steps of that epoch which are completed
        """
        self._state.steps = steps
        self.position.epoch = epoch
        for loader in self.position.loaders.values():
            loader.cursor = Cursor(epoch, windows * loader.spec.at(epoch).global_batch_size)
        self._run.context.agent.restored(steps, None)

    def write_checkpoint(self, folder: Path, objects: TrackedState) -> None:
        """Write the state of objects to a folder of its own, for any number of ranks. A collective.

        Raises:
            CheckpointError: a rank cannot write it.
        """
        with self._lifecycle.guard(stay=False):
            self._state.write_to(self._emptied(folder), objects)

    def read_checkpoint(self, folder: Path, objects: TrackedState) -> None:
        """Restore objects from a folder of :meth:`write_checkpoint`. A collective.

        Raises:
            CheckpointDamaged: the checkpoint is not complete.
            UsageError: it does not fit the objects.
        """
        with self._lifecycle.guard(stay=False):
            self._state.read_from(LocalStorage(folder), objects)

    def _emptied(self, folder: Path) -> LocalStorage:
        storage = LocalStorage(folder)
        if self.is_main:
            shutil.rmtree(folder, ignore_errors=True)
            storage.prepare()
        self._lifecycle.world.control.all_true(True)  # no rank writes before rank 0 has emptied the folder
        return storage

    @property
    def place(self) -> tuple[int, int]:
        """Epoch of the next step, and the number of steps of that epoch which are completed."""
        loader = self.position.first
        if loader is None:
            return self.epoch, 0
        if loader.spec.over(loader.cursor):
            return loader.cursor.epoch + 1, 0
        cursor = loader.cursor
        return cursor.epoch, cursor.consumed // loader.spec.at(cursor.epoch).global_batch_size

    @property
    def trains(self) -> bool:
        """Whether a training of this process uses the session."""
        return self._state.tracked is not None or bool(self.position.loaders)

    @property
    def epoch_ending(self) -> bool:
        """Whether the last step of the current epoch is complete, and what follows it in the epoch is not."""
        return any(loader.spec.over(loader.cursor) for loader in self.position.loaders.values())

    def complete_step(self, *, changes_state: bool) -> None:
        """Commit a step that the stack has taken; its code that follows may run again in another process.

        Args:
            changes_state: whether that code may change the state: an evaluation, for instance
        """
        self._steps.commit(pending=True, changes_state=changes_state)

    def advance_pending(self, *, changes_state: bool) -> None:
        """Note that the code which belongs to the last step has got as far as the stack's tracked objects say.

        If it is interrupted from now on, it is continued from here. Also called where it is continued.

        Args:
            changes_state: whether the rest of that code may change the state
        """
        self._steps.advance_code(changes_state=changes_state)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of the ranks' values of one shape, on the device of the value. A collective."""
        if self.world_size == 1:
            return value
        total = value.detach().clone().float()
        with self._lifecycle.guard(stay=False):
            dist.all_reduce(total)
        return total / self.world_size

    def all_have_arrived(self) -> None:
        """Wait until all ranks have run the code up to here, else interrupt it. A collective."""
        if self.world_size > 1:
            with self._lifecycle.guard(stay=False):
                self._lifecycle.world.control.all_true(True)

    def end_step(self) -> None:
        """End the code that belongs to a step. The process may be replaced in here. A collective at times."""
        self._steps.end_code()

    def begin_epoch_end(self) -> None:
        """Begin the code of the script that follows the last step of an epoch, and that a new process runs again."""
        self._state.found.begin_epoch_end()

    def end_epoch(self) -> None:
        """End the code that belongs to an epoch. The process may be replaced in here. A collective at times."""
        self._steps.end_epoch()

    def begin_repeated_steps(self) -> None:
        """Begin steps that are trained already: nothing that they change is kept."""
        self._state.found.begin_repeated_steps()
        self._lifecycle.discard_step()

    def end_repeated_steps(self, *, arrived: bool) -> None:
        """Undo what those steps have changed.

        Args:
            arrived: whether the script's own code has got as far as it had in the former process
        """
        self._lifecycle.end_discarded_step()
        if arrived:
            self._state.found.copy_restored(finally_=True)

    def expects(self, steps: int) -> None:
        """Report the number of steps that the whole run will have."""
        self._run.context.agent.report(Expects(steps))

    def observe(self, loss: Any) -> None:
        """Take the loss of a backward pass into account, to notice a NaN."""
        self._state.observe(loss)

    def adopt(self, objects: Mapping[str, Any]) -> None:
        """Track objects whose gradients the stack averages, see :meth:`track`."""
        # The state of a DeepSpeed engine has that of its model, optimizer and scheduler: tracked besides, they would be
        # saved and restored twice.
        parts = [part for value in objects.values() if is_engine(value) for part in EngineState.parts(value)]
        kept = {name: value for name, value in objects.items() if not any(_holds(value, part) for part in parts)}
        self._run.leave_gradients_to_script(*(value for value in kept.values() if hasattr(value, "parameters")))
        self._run.track(kept)


def _holds(value: Any, part: Any) -> bool:
    """Return whether an object is a part of a DeepSpeed engine, or accelerate's wrapper of one."""
    wraps = type(value).__name__ in ("DeepSpeedOptimizerWrapper", "DeepSpeedSchedulerWrapper")
    inner = getattr(value, "scheduler", getattr(value, "optimizer", None)) if wraps else None
    return value is part or (inner is not None and inner is part)


@cache
def stack_session() -> StackSession | None:
    """Return the session of this process, opened by the first call; ``None`` where the process is no worker of a run.

    Raises:
        OSError: the node's agent does not answer.
    """
    environment = WorkerEnvironment.read()
    if environment.channel is None or not environment.has_rank or has_run():
        return None
    settings = WorkerSettings.of(environment)
    batch = settings.plan.batch if settings.plan else FixedGlobalBatch()
    if not isinstance(batch, FixedGlobalBatch) or batch.reduce == "exact":
        _LOG.warning(
            "The script has no session, and its training stack cannot follow the batch policy %s: it trains without "
            'this library. Take FixedGlobalBatch() with reduce="allreduce", or open a session with train.start().',
            batch,
        )
        return None
    if not _group_is_whole(settings):
        return None
    session = StackSession(open_run(), batch.logical_workers or settings.max_world_size)
    wrap_function_wrapper(dist, "destroy_process_group", _finish_first)
    return session


def _group_is_whole(settings: WorkerSettings) -> bool:
    """Return whether the script has opened no process group, or that of all ranks, in which a session may train."""
    identity = settings.identity
    if not dist.is_initialized():
        return True
    if not settings.stays and (dist.get_rank(), dist.get_world_size()) == (identity.rank, identity.world_size):
        return True
    _LOG.warning(
        "The script has opened a process group of its own, with rank %d of %d where this process has rank %d of %d: it "
        "trains without this library. Leave torch.distributed.init_process_group() to the stack, or give it no rank or "
        "world size.",
        dist.get_rank(),
        dist.get_world_size(),
        identity.rank,
        identity.world_size,
    )
    return False


def _finish_first(wrapped: Callable[..., Any], _instance: Any, args: Any, kwargs: Any) -> Any:
    """Finish the session before a script or a stack closes the process group, without which that is impossible.

    Libraries of metrics open and close groups of their own in the middle of a training.
    """
    session = stack_session()
    group = args[0] if args else kwargs.get("group")
    if session is not None and (group is None or group is dist.group.WORLD):
        session.finish_before_end()
    return wrapped(*args, **kwargs)
