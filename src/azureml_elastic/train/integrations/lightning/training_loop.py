"""One call of ``Trainer.fit`` within a run.

Loggers, and callbacks that write to their folders, go on where the former process has ended.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.map_loader import WindowLoader
from azureml_elastic.train.integrations import sources
from azureml_elastic.train.integrations.lightning import progress, repeated_hooks
from azureml_elastic.train.integrations.lightning.checkpoint_hooks import OWN_KEY, callbacks_of
from azureml_elastic.train.integrations.lightning.left_to_lightning import warn_of_new_versions
from azureml_elastic.train.integrations.lightning.progress import Progress, Stage
from azureml_elastic.train.integrations.lightning.repeated_hooks import Extent
from azureml_elastic.train.integrations.wrapping import Wrapped, first_of
from azureml_elastic.train.session.stack_session import StackSession

_VERSIONS = {"TensorBoardLogger": "_version", "CSVLogger": "_version", "MLFlowLogger": "_run_id"}
"""Attribute with the version or the run, by class; other loggers take theirs from the script."""

_EMPTY_CHECK = "_ModelCheckpoint__warn_if_dir_not_empty"
"""Method of ``ModelCheckpoint`` that warns of files in its folder; in a run they are its own."""

_continued: dict[str, int] = {}
"""Number of steps that are logged in a folder."""

_LOG = logging.getLogger(__name__)

PROGRESS = "lightning"
"""Name of the tracked object with the trainer's progress."""

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


def set_versions(trainer: Any, versions: list[Any]) -> list[Any]:
    """Set the versions of loggers that have not begun to write, and return those loggers."""
    found = []
    for logger, (kind, version) in zip(trainer.loggers, versions, strict=False):
        name = _attribute(logger)
        begun = name == "_version" and getattr(logger, "_experiment", None) is not None
        if name and kind == type(logger).__name__ and version is not None and not begun:
            setattr(logger, name, version)
            found.append(logger)
    return found


def continue_from(trainer: Any, state: Mapping[str, Any]) -> None:
    """Have the loggers of a new trainer continue those of the former process, and callbacks accept its files.

    Args:
        state: ``versions`` of the loggers, and the number of steps that they have logged as ``lines``
    """
    warn_of_new_versions(trainer, [logger for logger in trainer.loggers if not _attribute(logger)])
    for logger in set_versions(trainer, state["versions"]):
        if getattr(logger, "log_dir", None) is not None:
            _continued[str(logger.log_dir)] = state["lines"]
    for callback in trainer.callbacks:
        if any(kind.__name__ == "SaveConfigCallback" for kind in type(callback).__mro__):
            callback.overwrite = True  # LightningCLI would refuse to write the same file again
        if hasattr(callback, _EMPTY_CHECK):
            setattr(callback, _EMPTY_CHECK, lambda _: None)


def continue_file(writer: Any) -> bool:
    """Have a writer of a CSV file append to it after the lines of the steps that are logged; return whether it will."""
    path, lines = Path(writer.metrics_file_path), _continued.get(str(writer.log_dir))
    if lines is None:
        return False
    if path.is_file():
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            names, found = list(reader.fieldnames or ()), list(reader)
        # Later steps are trained again, or their lines have not all been written.
        kept = [line for line in found if not (line.get("step") or "").isdigit() or int(line["step"]) < lines]
        if len(kept) < len(found):
            with path.open("w", newline="") as file:
                rest = csv.DictWriter(file, fieldnames=names)
                rest.writeheader()
                rest.writerows(kept)
        writer.metrics_keys = names
    return True


def _attribute(logger: Any) -> str | None:
    return next((_VERSIONS[each.__name__] for each in type(logger).__mro__ if each.__name__ in _VERSIONS), None)


def obstacle(session: StackSession, trainer: Any, model: Any, *_: Any) -> str | None:
    """Return why a call of ``Trainer.fit`` is left to the stack alone, and log it; ``None`` if it is not.

    Raises:
        UsageError: the stack does not work with the ranks of the run.
    """
    if trainer.world_size != session.world_size:
        raise UsageError(
            f"The run has {session.world_size} ranks, but Lightning works with {trainer.world_size}, so that each "
            'would train a model of its own. Give Trainer(strategy="ddp"), or set AZUREML_ELASTIC_INTEGRATIONS=off.'
        )
    strategy = type(trainer.strategy).__name__
    reasons: dict[str | None, bool] = {
        "another training of this process has used the session": session.trains,
        f"the strategy is {strategy}": strategy not in _STRATEGIES,
        "several ranks compute the same samples, by tensor parallelism": (
            strategy == "ModelParallelStrategy" and tensor_parallel_size(trainer.strategy) > 1
        ),
        "the optimization is manual": not model.automatic_optimization,
        "the training data are loaded anew in each epoch": bool(trainer.reload_dataloaders_every_n_epochs),
        "only a part of the training data is used": trainer.limit_train_batches != 1.0 or trainer.overfit_batches > 0,
        "ModelPruning renames the weights while it trains": any(
            kind.__name__ == "ModelPruning" for each in trainer.callbacks for kind in type(each).__mro__
        ),
    }
    reason = first_of(reasons)
    if reason is not None and session.is_main:
        _LOG.warning(
            "Trainer.fit() does not use the elastic session: %s. Where a node is lost or comes, the script starts "
            "again, and this training goes on from its own checkpoint if the script gives ckpt_path, else from its "
            "beginning; its steps and learning rates follow the number of ranks.",
            reason,
        )
    return reason


def tensor_parallel_size(strategy: Any) -> int:
    """Return how many ranks compute a layer together, by a ``ModelParallelStrategy``: by default all of a node."""
    size = strategy._tensor_parallel_size  # noqa: SLF001
    return int(strategy.num_processes if size == "auto" else size)


class TrainingLoop:
    """The integration's part in a training; the methods that take ``wrapped`` are called in place of Lightning's."""

    def __init__(self, session: StackSession, trainer: Any) -> None:
        self._session = session
        self._trainer = trainer
        self._progress = Progress(trainer)
        self._loader: WindowLoader | None = None
        self._accumulation = trainer.accumulate_grad_batches
        self._by_epoch = _accumulation_by_epoch(trainer)
        self._completed = False
        self._changes_state = False
        self._repeats = False
        self._begun = False
        self._reduced: set[int] = set()
        self._freed: list[torch.Tensor] = []
        """Weights that a hook has unfrozen since: DDP averages the gradients of those alone that it was given."""
        self._pending: Stage | None = None
        """Stage of the last step of the former process, while the rest of what belongs to it is being done."""

    def run(self, wrapped: Wrapped, model: Any, ckpt_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Fit from the state of the run, if it has one, else from the script's checkpoint."""
        trainer = self._trainer
        sanity_steps = trainer.num_sanity_val_steps
        if self._session.has_state():
            ckpt_path = trainer.ckpt_path = None
            trainer._checkpoint_connector._loaded_checkpoint = {}  # noqa: SLF001 - read before this call
            trainer.num_sanity_val_steps = 0  # they were run when the training began
        loggers = trainer.loggers if self._session.is_main else []
        versions = [[type(each).__name__, each.version if _attribute(each) else None] for each in loggers]
        # Rank 0's: each rank would find another free version as soon as one of them has made its folder.
        self._progress.versions = self._session.from_main(versions)
        set_versions(trainer, self._progress.versions)
        try:
            return wrapped(model, ckpt_path, *args, **kwargs)
        finally:
            trainer.accumulate_grad_batches = self._accumulation
            trainer.num_sanity_val_steps = sanity_steps
            trainer.callbacks = callbacks_of(trainer)

    def process_dataloader(self, wrapped: Wrapped, trainer: Any, function: Any, stage: Any, loader: Any) -> Any:
        """Return a loader of windows over the training data, where the order of those is known."""
        if stage != "train":
            return wrapped(trainer, function, stage, loader)
        if self._loader is not None:
            raise UsageError(
                "The script trains with several loaders at once, whose data have no single order. Train with one of a "
                "dataset that combines theirs, or set AZUREML_ELASTIC_INTEGRATIONS=off."
            )
        divides = trainer is None or trainer._accelerator_connector.use_distributed_sampler  # noqa: SLF001
        full = self._session.reference_world_size
        source = None if sources.obstacle(loader) is not None else sources.source_of(loader, full)
        if source is None or not (divides or source.sampler is None):
            if self._session.is_main:
                _LOG.warning(
                    "The training data come from %s with %s: Lightning divides them among the ranks, and samples may "
                    "repeat or be left out after a change of the world size.",
                    type(loader).__name__,
                    type(getattr(loader, "sampler", None)).__name__,
                )
            return wrapped(trainer, function, stage, loader)
        seed = source.seed_of(loader)
        self._loader = self._progress.loader = source.windows(
            self._session,
            seed=seed,
            drawn=source.drawn(seed, self._session.from_main),
            batch_size=source.batch_size,
            accumulation=self._accumulation,
            shuffle=source.shuffle or source.sampler is not None,
            by_epoch=self._by_epoch,
        )
        return self._loader

    def setup_data(self, wrapped: Wrapped) -> None:
        """Make the loader, and have Lightning validate after as many steps as with all ranks."""
        wrapped()
        self._follow_loader()

    def _follow_loader(self) -> None:
        """Set the numbers of batches by which Lightning counts: those of the loader in this epoch and round."""
        loader, trainer = self._loader, self._trainer
        if loader is None:
            return
        fit_loop = trainer.fit_loop
        number = loader.micro_batches
        trainer.accumulate_grad_batches = number
        fit_loop.max_batches = len(loader)
        fit_loop._combined_loader.limits = [len(loader)]  # noqa: SLF001
        if trainer.val_check_batch is not None:
            script = self._accumulation * self._factor  # batches of a step, by which the script counts
            interval = trainer.val_check_interval
            if not isinstance(interval, int):
                interval = max(1, int(len(loader) // number * script * interval))
            trainer.val_check_batch = max(1, interval * number // script)

    @property
    def _factor(self) -> int:
        """Number of the script's accumulated batches of a step in the current epoch."""
        begun = [first for first in self._by_epoch if first <= self._session.epoch]
        return self._by_epoch[max(begun)] if begun else 1

    def backward(self, wrapped: Wrapped, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Weigh a micro-batch's loss of shape () so that the mean over the ranks is the mean over the samples."""
        self._session.observe(loss)
        if self._loader is not None:
            # The last one yielded is the current one: Lightning fetches nothing ahead of a loader that has a length. It
            # has divided the loss by the batches of a step.
            loss = loss * (self._loader.untrained[-1].weight * self._loader.micro_batches)
        result = wrapped(loss, *args, **kwargs)
        if self._freed and (self._loader is None or self._loader.untrained[-1].last):
            for weight in self._freed:
                if weight.grad is not None:
                    weight.grad.copy_(self._session.mean(weight.grad))
        return result

    def restore_callbacks(self, wrapped: Wrapped) -> None:
        """Give callbacks their state of the run before they and the strategy are set up, as far as it can be had."""
        wrapped()
        if self._session.find(PROGRESS, "stage") is not None:
            states, frozen = (self._session.find(PROGRESS, part) for part in ("callbacks", "frozen"))
            self._progress.load_callbacks(states, frozen)

    def restore(self, wrapped: Wrapped) -> Any:
        """Restore the state of the run, or what the script's checkpoint holds."""
        trainer, session = self._trainer, self._session
        loaded = wrapped()
        if self._loader is None:
            trainer.fit_loop.setup_data()  # else Lightning's run() makes the loader, after its position was restored
        objects = {"model": trainer.strategy.model, PROGRESS: self._progress}
        for index, optimizer in enumerate(trainer.strategy.optimizers):
            objects[f"optimizer_{index}" if index else "optimizer"] = optimizer
        for index, config in enumerate(trainer.lr_scheduler_configs):
            objects[f"scheduler_{index}" if index else "scheduler"] = config.scheduler
        if (scaler := getattr(trainer.precision_plugin, "scaler", None)) is not None:
            objects["scaler"] = scaler
        own_step, done = trainer.global_step, self._progress.stage
        self._progress.capture(done)
        session.adopt(objects)
        self._follow_loader()
        self._reduced = {id(each) for each in trainer.lightning_module.parameters() if each.requires_grad}
        stage = self._progress.stage
        if own_step and not session.steps and self._loader is not None:  # of a checkpoint of another run
            windows = len(self._loader) // self._loader.micro_batches
            session.begin_at(own_step, *divmod(own_step, windows))
        if stage in (Stage.STEP, Stage.HOOKS, Stage.VALIDATED):
            self._pending, self._repeats, self._completed, self._changes_state = stage, True, True, True
            session.advance_pending(changes_state=True)
        elif self._loader is not None and session.epoch_ending:
            session.end_epoch()
        # Not before: when it begins to run, Lightning adds the model's callbacks, and moves those that save to the end.
        trainer.callbacks.insert(0, _AfterBatch(self._complete))
        trainer.callbacks.append(_AfterBatch(self._after_callbacks))
        return loaded

    def fit(self, wrapped: Wrapped) -> Any:
        """Run the epochs; where all steps were trained in former processes, what follows the last of them."""
        fit_loop = self._trainer.fit_loop
        fit_loop.setup_data()
        if not self._progress.loaded or not fit_loop.skip:
            return wrapped()
        # Lightning leaves out a loop that is done, with all that follows its last step. As _FitLoop.run has it:
        fit_loop.reset()
        fit_loop.on_run_start()
        if self._progress.stage is Stage.EPOCH:
            self._begin(lambda: None)
        else:
            fit_loop.on_advance_start()
            if self._pending is not None:
                fit_loop.advance()
            fit_loop.on_advance_end()
            fit_loop.on_iteration_done()
        return fit_loop.on_run_end()

    def _complete(self, outputs: Any) -> None:
        """Complete a step after its last micro-batch, before the hooks of others: they may save, or lose a peer."""
        if self._pending is not None:
            return
        epoch_loop = self._trainer.fit_loop.epoch_loop
        if self._loader is None:
            if epoch_loop._should_accumulate():  # noqa: SLF001
                return
        elif not self._loader.untrained[-1].last:
            return
        self._completed = True
        due = epoch_loop._should_check_val_fx(self._trainer.fit_loop._data_fetcher)  # noqa: SLF001
        # A validation may change the model's state, by its hooks or by a scheduler; so may the end of an epoch.
        self._changes_state = bool(due or epoch_loop.batch_progress.is_last_batch)
        self._progress.record = progress.recorded(self._trainer, outputs)
        self._progress.capture(Stage.STEP)
        self._session.complete_step(changes_state=self._changes_state)

    def _after_callbacks(self, _: Any) -> None:
        self._progress.extent = max(self._progress.extent, Extent.CALLBACKS)

    def start_training(self, wrapped: Wrapped) -> None:
        """Run the hooks before the first epoch, which know the script's own settings."""
        trainer = self._trainer
        batches, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, self._accumulation
        wrapped()
        trainer.accumulate_grad_batches = batches

    def start_epoch(self, wrapped: Wrapped) -> None:
        """Run what belongs to the beginning of an epoch; in a new process, then continue with what a former one had."""
        trainer, expected = self._trainer, self._trainer.accumulate_grad_batches
        if self._begun:
            begins = True
            wrapped()
        else:
            begins = self._begin(wrapped)
        wanted = self._accumulation * self._factor if self._by_epoch else expected
        if self._loader is not None and not trainer.fit_loop._skip_backward:  # noqa: SLF001
            if (number := trainer.accumulate_grad_batches) not in (expected, wanted):
                raise UsageError(
                    f"A hook has set trainer.accumulate_grad_batches={number}, but the samples of a step are "
                    f"divided into {expected} batches. Give Lightning's GradientAccumulationScheduler "
                    "the epochs, or set AZUREML_ELASTIC_INTEGRATIONS=off."
                )
            self._follow_loader()
        if type(trainer.strategy).__name__ == "DDPStrategy":
            weights = trainer.lightning_module.parameters()
            self._freed = [each for each in weights if each.requires_grad and id(each) not in self._reduced]
        if begins:
            self._progress.capture(Stage.BEGUN)

    def _begin(self, start: Callable[[], Any]) -> bool:
        """Start the first epoch of a process; return whether it is one that no former process has begun."""
        self._begun, loaded, stage = True, self._progress.loaded, self._progress.stage
        self._progress.attributes.begin()
        if loaded and stage is Stage.EPOCH:
            self._progress.continue_attributes()
        start()
        within = self._trainer.fit_loop.restarted_mid_epoch
        if loaded and stage is not Stage.EPOCH:
            if within:
                repeated_hooks.begin_epoch_again(self._trainer)
            self._progress.continue_attributes()
        return not within

    def begin_epoch(self, wrapped: Wrapped, fetcher: Any) -> None:
        """Begin an epoch, or continue it: do what belongs to the last step, and the former process has not done."""
        wrapped(fetcher)
        if self._pending is None:
            return
        epoch_loop = self._trainer.fit_loop.epoch_loop
        # As advance() does before it trains: a loop that restarts would go on within its last validation.
        epoch_loop.val_loop.restarting = False
        if self._pending is Stage.STEP and self._loader is not None:
            record, attributes = progress.numbers(self._progress.record), self._progress.attributes
            batch, extent = self._loader.repeat(), self._progress.extent
            repeated_hooks.run_hooks(self._trainer, batch, record, attributes, extent)
            self._progress.extent = Extent.ALL
        epoch_loop.on_advance_end(fetcher)
        epoch_loop.on_iteration_done()

    def end_step(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Validate if it is due, then end the step."""
        if not self._completed:
            return wrapped(*args, **kwargs)
        pending, self._pending = self._pending, None
        self._progress.extent = Extent.ALL
        if pending is not Stage.VALIDATED:
            if pending is not Stage.HOOKS:
                # The hooks of a rank that is lost before this are run again: most scripts log on rank 0 alone.
                self._session.all_have_arrived()
                if self._changes_state:
                    self._advance(Stage.HOOKS)
            with repeated_hooks.same_names(self._trainer, repeated=self._repeats):
                wrapped(*args, **kwargs)
            if self._changes_state:
                self._session.all_have_arrived()
        if self._loader is not None and self._session.epoch_ending:
            self._advance(Stage.VALIDATED)
            return None
        self._completed = self._repeats = False
        self._progress.capture(Stage.DONE)
        self._session.end_step()
        return None

    def _advance(self, stage: Stage) -> None:
        self._progress.capture(stage)
        self._session.advance_pending(changes_state=True)

    def end_epoch(self, wrapped: Wrapped, *args: Any, **kwargs: Any) -> Any:
        """Run what belongs to the epoch's end, then end it."""
        fit_loop = self._trainer.fit_loop
        fit_loop._restarting = False  # noqa: SLF001 - else Lightning leaves out schedulers that follow a metric
        with repeated_hooks.same_names(self._trainer, repeated=self._repeats):
            added, self._progress.sums = progress.continue_with(self._trainer, self._progress.sums), {}
            result = wrapped(*args, **kwargs)
            progress.forget(self._trainer, added)
        self._session.all_have_arrived()
        self._completed = self._repeats = False
        self._progress.capture(Stage.EPOCH)
        self._session.end_epoch()
        return result


def _accumulation_by_epoch(trainer: Any) -> dict[int, int]:
    """Return how many batches Lightning's callback accumulates from which epoch, if the trainer has it."""
    for callback in trainer.callbacks:
        if any(kind.__name__ == "GradientAccumulationScheduler" for kind in type(callback).__mro__):
            return {epoch: callback.get_accumulate_grad_batches(epoch) for epoch in callback.scheduling}
    return {}


class _AfterBatch:
    """A callback of Lightning that knows one event; callbacks that save come after it."""

    state_key = _legacy_state_key = OWN_KEY

    def __init__(self, act: Callable[[Any], None]) -> None:
        self._act = act

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Note the end of a batch."""
        self._act(outputs)

    def state_dict(self) -> dict[str, Any]:
        """Return no state."""
        return {}

    def __getattr__(self, name: str) -> Any:
        """Return a method that does nothing for each other event."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None
