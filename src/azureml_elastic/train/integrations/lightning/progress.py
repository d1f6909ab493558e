"""What a Lightning ``Trainer`` knows of its training besides model, optimizers and schedulers, as a tracked object.

A step is complete before its hooks have run, and they before its validation and the end of its epoch. The stage says
how far a process has got with what belongs to the last step, so that the next process does the rest, once.

A rank adds up what ``self.log(..., on_epoch=True)`` logs for its own batches. The next process goes on from the sums of
the rank whose state it continues, as those of a lost rank are gone: a mean is then one over the batches of that rank,
and a sum is what they make of all batches.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

import torch

from azureml_elastic.checkpoint.state import tree
from azureml_elastic.distributed.device import Fetched, device_of
from azureml_elastic.train.data.map_loader import WindowLoader
from azureml_elastic.train.integrations.lightning import checkpoint_hooks
from azureml_elastic.train.integrations.lightning.attributes import Attributes, scaled
from azureml_elastic.train.integrations.lightning.checkpoint_hooks import callbacks_of
from azureml_elastic.train.integrations.lightning.repeated_hooks import Extent
from azureml_elastic.train.integrations.nested import map_tensors

_SUM, _COUNT = "value", "cumulated_batch_size"
_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx")

Sums = dict[str, dict[str, Any]]

_BATCHES = "epoch_loop.batch_progress"
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")

_LOG = logging.getLogger(__name__)


def added_up(trainer: Any, earlier: Sums) -> Sums:
    """Return the sums of the epoch by metric, with those of former processes.

    Objects of ``torchmetrics`` have states of their own, which are kept with the module's attributes.
    """
    found = dict(earlier)
    for key, metric in trainer.fit_loop.epoch_loop._results.items():  # noqa: SLF001
        meta = metric.meta
        if meta.on_epoch and not metric.has_reset and meta.dataloader_idx is None:
            found[key] = {
                **{name: getattr(meta, name) for name in _FIELDS},
                "reduce_fx": meta.reduce_fx.__name__,
                "sync_dist": meta.sync.should,
                "rank_zero_only": meta.sync.rank_zero_only,
                "metric_attribute": meta.metric_attribute,
            }
            if not metric.is_tensor:
                continue
            found[key] |= {
                _SUM: _joined(metric, key, _SUM, earlier),
                _COUNT: _joined(metric, key, _COUNT, earlier) if meta.is_mean_reduction else 0,
            }
    return found


def divided(sums: Sums, ranks: int, ranks_now: int) -> Sums:
    """Return what a rank would have added up if there had been the present number of ranks."""
    share = ranks / ranks_now
    return {
        key: {
            **state,
            _SUM: state[_SUM] * (share if state["reduce_fx"] in ("mean", "sum") else 1),
            _COUNT: state[_COUNT] * share,
        }
        if _SUM in state
        else state
        for key, state in sums.items()
    }


def continue_with(trainer: Any, earlier: Sums) -> list[str]:
    """Add the sums of former processes to those of this one, once; return the metrics that only those know."""
    results, unknown = trainer.fit_loop.epoch_loop._results, []  # noqa: SLF001
    for key, state in earlier.items():
        if key not in results or results[key].has_reset:
            unknown.append(key)
            properties = {name: state[name] for name in state if name not in (_SUM, _COUNT)}
            properties["sync_dist_fn"] = trainer.strategy.reduce
            results.pop(key, None)
            # It is logged to be made with its properties alone: its numbers are set below.
            if _SUM not in state:
                metric = trainer.lightning_module.get_submodule(state["metric_attribute"])
                results.log(value=metric, batch_size=1, **properties)
                continue
            first = torch.as_tensor(state[_SUM], device=trainer.strategy.root_device)
            results.log(value=first, batch_size=1, **properties)
            results[key].reset()
            results[key].has_reset = False
        if _SUM not in state:
            continue
        metric = results[key]
        joined = {name: _joined(metric, key, name, earlier) for name in (_SUM, _COUNT) if hasattr(metric, name)}
        for name, value in joined.items():
            setattr(metric, name, value)
        # As after an update: a result of before would be returned once more, and compute() warns if there was none.
        metric._computed, metric._update_count = None, 1  # noqa: SLF001
    return unknown


def forget(trainer: Any, keys: list[str]) -> None:
    """Remove metrics that :func:`continue_with` has made: the script will make them as it wants them."""
    for key in keys:
        trainer.fit_loop.epoch_loop._results.pop(key, None)  # noqa: SLF001


def _joined(metric: Any, key: str, name: str, earlier: Sums) -> Any:
    own = getattr(metric, name)
    if key not in earlier:
        return own
    other = torch.as_tensor(earlier[key][name], device=own.device)
    if metric.meta.is_max_reduction or metric.meta.is_min_reduction:
        return metric.meta.reduce_fx(own, other)
    return own + other


def recorded(trainer: Any, outputs: Any) -> dict[str, dict[str, float | Fetched]]:
    """Return the metrics of the current step as they are before its hooks, and the numbers among its outputs.

    Those of a GPU are on their way, so that no step waits for them; see :func:`numbers`.
    """
    metrics = trainer._logger_connector.metrics["log"]  # noqa: SLF001
    found = outputs.items() if isinstance(outputs, Mapping) else ()
    outputs = {name: _fetched(value) for name, value in found if isinstance(value, torch.Tensor) and value.numel() == 1}
    return {"metrics": {name: _fetched(value) for name, value in metrics.items()}, "outputs": outputs}


def numbers(record: Mapping[str, Mapping[str, float | Fetched]]) -> dict[str, dict[str, float]]:
    """Return what :func:`recorded` has returned, and wait for what has not arrived."""
    return {
        part: {name: float(value.read()) if isinstance(value, Fetched) else value for name, value in values.items()}
        for part, values in record.items()
    }


def _fetched(value: Any) -> float | Fetched:
    return device_of(value.device).fetch(value) if isinstance(value, torch.Tensor) else float(value)


class Stage(Enum):
    """What has been done of what belongs to the last completed step."""

    STEP = "step"
    """Nothing: the hooks of its last batch follow."""
    HOOKS = "hooks"
    """The hooks have run on all ranks: a validation may follow, and the end of the epoch."""
    VALIDATED = "validated"
    """All but the end of the epoch."""
    DONE = "done"
    """All of it, within an epoch."""
    EPOCH = "epoch"
    """All of it, and of the epoch."""
    BEGUN = "begun"
    """The next epoch has begun: hooks may have changed weights, averages and parameter groups."""


class Progress:
    """The progress of the loops, the states of the callbacks and the metrics, as they were at the last capture.

    Attributes:
        loader: loader of the training data, ``None`` where Lightning divides those
        versions: versions of the trainer's loggers
        loaded: whether a former process has trained
        stage: stage of the last capture, or of the former process
        sums: what former processes have added up in this epoch
        record: what the hooks of the last step need, see :func:`recorded`
        attributes: those of the module and callbacks
        extent: hooks of the last step that have run, see :class:`Extent`
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._captured: dict[str, Any] = {}
        self._begun: set[str] = set()  # callbacks that have their state before the others
        self._frozen: list[str] = []  # parameters without gradients
        self.attributes = Attributes(trainer)
        self.loader: WindowLoader | None = None
        self.versions: list[Any] = []
        self.loaded = False
        self.stage = Stage.DONE
        self.sums: Sums = {}
        self.record: dict[str, dict[str, float | Fetched]] = {}
        self.extent = Extent.NONE

    def capture(self, stage: Stage) -> None:
        """Take over the trainer's current state."""
        trainer, self.stage = self._trainer, stage
        if stage is Stage.BEGUN:
            weights = trainer.lightning_module.named_parameters()
            self._frozen = [name for name, weight in weights if not weight.requires_grad]
        self.extent = Extent.NONE if stage is Stage.STEP else Extent.ALL
        plain, with_tensors = _divided_states(callbacks_of(trainer))
        datamodule = None if trainer.datamodule is None else trainer.datamodule.state_dict()
        self._captured = {
            "loops": _state_of(trainer.fit_loop),
            "callbacks": plain,
            "callback_tensors": with_tensors,
            # Schedulers and callbacks that follow a metric read the one that was logged last.
            "metrics": {name: dict(getattr(trainer._logger_connector, name)) for name in _METRICS},  # noqa: SLF001
            "sums": {} if stage in (Stage.EPOCH, Stage.BEGUN) else added_up(trainer, self.sums),
            "ranks": trainer.world_size,
            "record": self.record if stage is Stage.STEP else {},
            "attributes": self.attributes.capture(),
            "should_stop": trainer.should_stop,
            "frozen": self._frozen,
            "datamodule": datamodule or {},
            "loggers": {"versions": self.versions, "lines": self._lines()},
            # Batches of a step, by which the loops count, in this epoch.
            "micro_batches": None if self.loader is None else [self.loader.epoch, self.loader.micro_batches],
            "stage": stage.value,
        }

    def _lines(self) -> int:
        # After the hooks the line of the step is written, whose number is not counted yet.
        return int(self._trainer.fit_loop.epoch_loop._batches_that_stepped) + (self.stage is Stage.HOOKS)  # noqa: SLF001

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the last capture, with what hooks for checkpoints save.

        Those are called here, as they take long: before the next hook of a step changes what they save.
        """
        if not self._captured:
            return {}
        hooks = checkpoint_hooks.saved(self._trainer, self._captured)
        found = {**self._captured, "hooks": hooks, "record": numbers(self._captured["record"]), "extent": self.extent}
        return {**found, "attributes": map_tensors(torch.Tensor.detach, found["attributes"])}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with the state of a former process."""
        if not state_dict:
            return
        trainer, self.loaded = self._trainer, True
        self.stage, self.record, self.extent = Stage(state_dict["stage"]), state_dict["record"], state_dict["extent"]
        self._captured = {name: value for name, value in state_dict.items() if name not in ("hooks", "extent")}
        self.sums = divided(state_dict["sums"], state_dict["ranks"], trainer.world_size)
        self._load_loops(copy.deepcopy(state_dict["loops"]), state_dict["micro_batches"])
        checkpoint_hooks.restore(trainer, state_dict["hooks"], self._captured)
        begun, self._begun = self._begun, set()
        for callback in callbacks_of(trainer):
            key = callback.state_key
            if key in state_dict["callbacks"] and (key not in begun or state_dict["callback_tensors"].get(key)):
                state = {**state_dict["callbacks"][key], **state_dict["callback_tensors"].get(key, {})}
                _load_callback(callback, copy.deepcopy(state))
        for name, values in state_dict["metrics"].items():
            setattr(trainer._logger_connector, name, dict(values))  # noqa: SLF001
        trainer.should_stop = state_dict["should_stop"]
        if state_dict["datamodule"] and trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(copy.deepcopy(state_dict["datamodule"]))

    def load_callbacks(self, states: Mapping[str, Any], frozen: Collection[str]) -> None:
        """Give callbacks their state when Lightning would, before the training is set up: those without tensors.

        Callbacks such as ``BackboneFinetuning`` make parameter groups by it, which an optimizer's state must find, and
        have freed weights whose gradients data parallelism averages.

        Args:
            states: those of the callbacks, by their keys
            frozen: names of the parameters that have no gradients
        """
        self._frozen = list(frozen)
        for name, weight in self._trainer.lightning_module.named_parameters():
            weight.requires_grad_(name not in frozen)
        for callback in callbacks_of(self._trainer):
            key = callback.state_key
            if key in states and states[key].keys() == callback.state_dict().keys():
                _load_callback(callback, copy.deepcopy(states[key]))
                self._begun.add(key)

    def continue_attributes(self) -> None:
        """Give the module and callbacks the attributes that they had, once their hooks at the beginning have run."""
        captured = scaled(self._captured["attributes"], self._trainer, self._captured["ranks"])
        captured = map_tensors(lambda each: each.to(self._trainer.strategy.root_device), captured)
        self.attributes.apply(captured)
        self.attributes.left_out.update(captured.get("left_out", ()))
        if self._trainer.is_global_zero:
            if lost := captured.get("left_out"):
                _LOG.warning("These begin anew in this process, as they hold more than numbers and tensors: %s.", lost)
            if self.stage is not Stage.EPOCH and (names := self.attributes.names(captured)):
                _LOG.warning(
                    "What each rank has collected by itself in this epoch, in %s, goes on from that of one rank: what "
                    "the others had collected before this process is not in it.",
                    ", ".join(names),
                )

    def _load_loops(self, loops: dict[str, Any], micro_batches: list[int] | None) -> None:
        """Restore the loops as after the hooks of the last batch, which the integration repeats by itself."""
        before = now = 1
        if micro_batches is not None and self.loader is not None:
            epoch, before = micro_batches
            now = self.loader.micro_batches_in(epoch)
        fit_loop, batches = self._trainer.fit_loop, loops[_BATCHES]
        for kind in ("total", "current"):
            counts = batches[kind]
            # In the stage STEP the batch is trained, and not yet counted as completed.
            done = {name: counts["ready"] if self.stage is Stage.STEP else count for name, count in counts.items()}
            batches[kind] = {name: count // before * now for name, count in done.items()}
        fit_loop.load_state_dict(loops)
        if self.stage is Stage.EPOCH:
            _begin_anew(fit_loop)
        elif self.stage is Stage.BEGUN:
            _begin_anew(fit_loop.epoch_loop)


def _divided_states(callbacks: list[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    plain: dict[str, Any] = {}
    with_tensors: dict[str, Any] = {}
    for each in callbacks:
        if state := each.state_dict():
            parts = {name: bool(tree.split("", value)[1]) for name, value in state.items()}
            plain[each.state_key] = {name: state[name] for name, found in parts.items() if not found}
            if any(parts.values()):
                with_tensors[each.state_key] = {name: state[name] for name, found in parts.items() if found}
    return plain, with_tensors


def _load_callback(callback: Any, state: dict[str, Any]) -> None:
    if "dirpath" in state and hasattr(callback, "best_k_models"):
        state["dirpath"] = callback.dirpath  # with another one, the best of the run so far would be forgotten
    callback.load_state_dict(state)


def _state_of(loop: Any, prefix: str = "") -> dict[str, Any]:
    """Return what ``loop.state_dict()`` does, which copies by ``dataclasses.asdict``: it is taken twice in a step."""
    state = {f"{prefix}state_dict": loop.on_save_checkpoint()}
    for name, value in vars(loop).items():
        if hasattr(value, "on_iteration_done"):
            state |= _state_of(value, f"{prefix}{name}.")
        elif hasattr(value, "from_state_dict"):
            state[f"{prefix}{name}"] = _counts(value)
    return state


def _counts(progress: Any) -> dict[str, Any]:
    return {name: value if isinstance(value, int) else _counts(value) for name, value in vars(progress).items()}


def _begin_anew(loop: Any) -> None:
    """Have a loop and those in it begin the next epoch as after any other; their setter would not, by ``max_steps``."""
    loop._restarting = False  # noqa: SLF001
    for inner in vars(loop).values():
        if hasattr(inner, "_restarting"):
            _begin_anew(inner)
