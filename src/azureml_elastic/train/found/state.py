"""State that was found, as a tracked object: in snapshots and checkpoints, handed over, exchanged and restored.

It is not declared, so it cannot be refused. What is not found again in a process, what differs between ranks, and what
is bound anew in each step is named in the log, once.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from typing_extensions import override

from azureml_elastic.checkpoint.state import tree
from azureml_elastic.checkpoint.state.tracked import Tensors, Tracked
from azureml_elastic.checkpoint.state.tracked_state import TrackedState
from azureml_elastic.distributed.control_group import ControlGroup
from azureml_elastic.train.found.comparison import Change, Changes, Comparison, agreed, checksums
from azureml_elastic.train.found.numbers import Numbers
from azureml_elastic.train.found.search import (
    Found,
    FoundTensor,
    frames_of,
    memory_key,
    package_of,
    search,
    version_of,
    write,
)
from azureml_elastic.train.found.step_parts import StepPart

_LOG = logging.getLogger(__name__)

_SHOWN = 4
_FAILED = (
    "The script's state beside the tracked objects cannot be looked for: what it keeps there begins anew in new "
    "processes, unless it is tracked."
)


class FoundState(Tracked):
    """The state that the script keeps beside the tracked objects.

    Attributes:
        repeated: whether the script repeats trained steps, and its own code in them, after a restart
        error: error that has left the script's frames, which are taken from it then
    """

    def __init__(self) -> None:
        super().__init__("found")
        self.repeated = False
        self._thread = threading.get_ident()
        self.error: BaseException | None = None
        self._tracked: TrackedState | None = None
        self._comparison = Comparison()
        self._begun = False
        self._state: dict[str, torch.Tensor] = {}  # also what the script has left behind when it ends
        self._buffers: set[str] = set()
        self._others: dict[str, list[str]] = {}
        self._apart: set[str] = set()
        self._waited: Counter[str] = Counter()
        self._values: dict[str, torch.Tensor] = {}  # restored, and not copied to where they belong yet
        self._numbers = Numbers()
        self._numbers_restored: dict[str, Any] = {}
        self._numbers_before: dict[str, Any] = {}
        self._committed: dict[str, int] = {}
        self._at_epoch_end: dict[str, torch.Tensor] | None = None  # until the next step begins
        self._named: set[str] = set()
        self._forward = StepPart()
        self._code = StepPart()

    def attach(self, tracked: TrackedState) -> None:
        """Look for state beside tracked objects from now on."""
        self._tracked = tracked

    # --- moments of a step -------------------------------------------------------------------------------------------

    def begin_repeated_steps(self) -> None:
        """Note the beginning of steps that are trained already: what changes in them alone is state as well."""
        if self._tracked is not None:
            self._begin_comparison()

    def begin_step(self, *, undone: bool) -> None:
        """Note the beginning of a step, when its first batch is taken.

        Args:
            undone: whether the step may have to be undone
        """
        if self._tracked is None:
            return
        self._at_epoch_end = None
        if self._values:
            self.copy_restored(finally_=True)
        self._begin_comparison()
        versions, self._committed = self._committed, {}
        late = [path for path, version in versions.items() if version_of(self._state[path]) != version]
        self._name("late", late,
                   "%s: changed after run.commit(). A new process goes on behind that call, so that it may lack one "
                   "such change each time: call run.commit() after it.")  # fmt: skip
        if undone and self._state:
            self._forward.begin({**self._state})
        self._numbers_before = self._numbers.collect() if undone else {}

    def _begin_comparison(self) -> None:
        self._thread = threading.get_ident()
        if self._begun:
            return
        self._begun = True
        try:
            found = self._search()
            self._comparison.compare(found, {*self._state})
            self._watch(found)
            self._numbers.changed()
        except Exception:  # noqa: BLE001 - of objects of any kind, for which nobody has asked
            self._comparison = Comparison()
            _LOG.exception(_FAILED)

    def begin_update(self) -> None:
        """Note that the forward and backward pass of a step are complete."""
        if not self._begun:  # a loop without a loader, whose batches are not seen
            self.begin_step(undone=False)
        self._forward.end()
        self._numbers_before = {}

    def undo_step(self) -> None:
        """Undo what the forward pass of a step has changed."""
        self._numbers.put(self._numbers_before)
        self._name("undone", self._forward.undo(),
                   "%s changed in the step that was interrupted, for the first time before its update: it continues "
                   "from there, one change ahead.")  # fmt: skip

    def end_commit(self) -> None:
        """Note the end of a call of the session, after which code may follow that no other process runs again."""
        self._committed = {path: version_of(each) for path, each in self._state.items()}

    def begin_code(self) -> None:
        """Note the beginning of code that belongs to the last step."""
        if not self.repeated:
            self._code.begin({**self._state})
            self._numbers_before = self._numbers.collect()

    def end_code(self) -> None:
        """Note its end."""
        self._code.end()
        self._numbers_before = {}

    def undo_code(self) -> None:
        """Undo what that code has changed."""
        self._numbers.put(self._numbers_before)
        self._name("undone", self._code.undo(),
                   "%s changed in code after a step that was interrupted and runs again, for the first time: it "
                   "continues from there, one change ahead.")  # fmt: skip

    def begin_epoch_end(self) -> None:
        """Note the end of an epoch's last step: the code up to the next step runs again in a new process.

        Until then the state is what it is now, also once the script has run all of that code.
        """
        tensors: dict[str, torch.Tensor] = {}
        if self._begun and not self._values:
            try:
                found = self._search()
                self._follow(found)
                # What has changed may turn out to be state in that code.
                tensors = {path: each.tensor for path, each in self._changes(found)[0].state.items()}
            except Exception:  # noqa: BLE001 - what is known is kept
                _LOG.exception(_FAILED)
        tensors |= self._state
        self._at_epoch_end = {path: each.detach().to("cpu", copy=True) for path, each in tensors.items()}

    def capture(self) -> Callable[[], None]:
        """Copy the state, and return a function that restores it; where the loop repeats it, that does nothing."""
        if self.repeated:
            return lambda: None
        numbers = self._numbers.collect()
        copies = [(each.detach(), each.detach().to("cpu", copy=True)) for each in self._state.values()]

        def restore() -> None:
            for target, value in copies:
                write(target, value)
            self._numbers.put(numbers)

        return restore

    # --- what is state -----------------------------------------------------------------------------------------------

    def agree(self, control: ControlGroup) -> None:
        """Find out what is state, and the same on all ranks. A collective."""
        if self._tracked is None:
            return
        changes = Changes()
        mine: dict[str, Change] = {}
        numbers: dict[str, Change] = {}
        if self._begun:
            try:
                changes, mine = self._changes(self._search())
                numbers = {path: Change(value, buffer=False) for path, value in self._numbers.changed().items()}
            except Exception:  # noqa: BLE001 - the other ranks wait for this one
                _LOG.exception(_FAILED)
        found = control.gather((mine, numbers)) if control.world_size > 1 else [(mine, numbers)]
        same, apart = agreed([tensors for tensors, _ in found], self._waited)
        self._apart.update(apart)
        same_numbers, apart = agreed([each for _, each in found], Counter())
        self._numbers.state = (self._numbers.state | {*same_numbers}) - {*apart}
        self._apart.update(apart)
        for path in same:
            if path in changes.state:
                self._keep(path, changes.state[path])
        if control.rank == 0:
            self._name_the_rest(changes)

    def end_round(self, world_size: int) -> None:
        """Name what has changed and is not known to be state, as the process hands over what is known."""
        if not self._begun or self._values:
            return
        try:
            changes, _ = self._changes(self._search())
        except Exception:  # noqa: BLE001 - what is known is handed over
            _LOG.exception(_FAILED)
            return
        for path, each in changes.state.items():
            if world_size == 1:
                self._keep(path, each)
        self._name("young", [] if world_size == 1 else [*changes.state],
                   "%s: changed by the script in its loop, but not yet known to be the same on all ranks. It begins "
                   "anew in the next process.")  # fmt: skip

    def _changes(self, found: Found) -> tuple[Changes, dict[str, Change]]:
        changes = self._comparison.compare(found, {*self._state, *self._apart})
        self._name("sharded", found.sharded,
                   "%s: parts of sharded tensors beside the tracked objects. If they change, as an average of sharded "
                   "weights does, they begin anew after a restart: track the module that holds them.")  # fmt: skip
        if not found.complete:
            self._name("incomplete", ["the script's objects"],
                       "%s are more than are looked into for state beside the tracked objects: what is not found "
                       "begins anew after a restart, unless it is tracked.")  # fmt: skip
        self._watch(found)
        sums = checksums([each.tensor for each in changes.state.values()])
        pairs = zip(changes.state.items(), sums, strict=True)
        return changes, {path: Change(value, each.buffer) for (path, each), value in pairs}

    def _watch(self, found: Found) -> None:
        """Watch the numbers of what holds tensors, and of objects of a trainer's kind."""
        if not self.repeated:
            self._numbers.watch(each.holder for each in found.tensors if each.holder is not None)
            self._numbers.watch(found.derived)

    def _keep(self, path: str, each: FoundTensor) -> None:
        self._state[path] = each.tensor
        self._others[path] = [*each.others, each.path] if each.path != path else [*each.others]
        if each.buffer:
            self._buffers.add(path)

    def _name_the_rest(self, changes: Changes) -> None:
        if self.repeated:  # sums of losses, which repeated steps make again
            changes.rebound = [each for each in changes.rebound if each.tensor.dim()]
            sums = {path for path, each in changes.state.items() if not each.tensor.dim()}
            self._named |= {f"apart {path}" for path in self._apart & sums}
        self._name("apart", sorted(self._apart),
                   "%s: changed by the script in its loop, and not the same on all ranks. It begins anew in new "
                   "processes, after each change of the nodes.")  # fmt: skip
        self._name("too large", changes.too_large,
                   "%s: changed by the script in its loop, and too large to be looked after. It begins anew in new "
                   "processes: track the object that holds it.")  # fmt: skip
        likely = [each for each in changes.rebound if each.tensor.is_floating_point()]
        likely = [each for each in likely if (each.updated or not each.local) and not _looked_after(each)]
        self._name("rebound", [each.path for each in likely],
                   "%s: bound to another tensor in each step. If it is computed from its former value, as a running "
                   "average is, it begins anew in new processes: change it in place, as by average.lerp_(value, 0.1), "
                   "or track the object that holds it.")  # fmt: skip

    def _name(self, kind: str, paths: Iterable[str], text: str) -> None:
        new = [path for path in paths if f"{kind} {path}" not in self._named]
        self._named.update(f"{kind} {path}" for path in new)
        if new:
            shown = ", ".join(new[:_SHOWN])
            _LOG.warning(text, f"{shown} and {len(new) - _SHOWN} more" if len(new) > _SHOWN else shown)

    # --- the tracked object ------------------------------------------------------------------------------------------

    @override
    def collect(self) -> tuple[Any, dict[str, torch.Tensor]]:
        if self._state:
            self._follow(self._search())
        values = {**self._values, **self._state}
        if (then := self._at_epoch_end) is not None:
            # What has changed only since then begins anew in a new process, and is changed there by the same code.
            values = {path: then.get(path, each) for path, each in values.items() if path in {*then, *self._values}}
        plain, tensors = tree.split(self.name, values)
        details = {
            path: {
                "shape": list(each.shape),
                "dtype": str(each.dtype).removeprefix("torch."),
                "others": self._others.get(path, []),
                "buffer": path in self._buffers,
            }
            for path, each in values.items()
        }
        numbers = {**self._numbers_restored, **self._numbers.collect()}
        return {"tensors": plain, "details": details, "numbers": numbers}, {
            name: each.detach() for name, each in tensors.items()
        }

    @override
    def common(self, tensors: Tensors) -> set[str]:
        return {name for name in tensors if name.removeprefix(f"{self.name}/") not in self._buffers}

    @override
    def targets(self, plain: Any) -> dict[str, torch.Tensor]:
        values = {
            path: torch.empty(each["shape"], dtype=getattr(torch, each["dtype"]))
            for path, each in plain["details"].items()
        }
        return tree.split(self.name, values)[1]

    @override
    def restore(self, plain: Any, tensors: Tensors) -> None:
        values = tree.join(plain["tensors"], tensors)
        self._state.clear()
        self._committed.clear()
        self._at_epoch_end = None
        self._values = {path: each.detach().clone() for path, each in values.items()}
        self._others = {path: list(each["others"]) for path, each in plain["details"].items()}
        self._numbers_restored = dict(plain["numbers"])
        self._buffers = {path for path, each in plain["details"].items() if each["buffer"]}
        if not self.repeated:
            self.copy_restored(finally_=False)

    def copy_restored(self, *, finally_: bool) -> None:
        """Copy what was restored to where the same paths lead to.

        Args:
            finally_: whether what is not found by now is given up
        """
        if not (self._values or self._numbers_restored):
            return
        found_now = self._search()
        by_path: dict[str, FoundTensor] = {}
        for each in found_now.tensors:
            for path in (each.path, *each.others):
                by_path.setdefault(path, each)
        for path, value in list(self._values.items()):
            # What a container holds lives longer than a variable, which a loop over it may have bound.
            found = (by_path.get(each) for each in (*self._others.get(path, ()), path))
            fits = next((each for each in found if each is not None and _fits(each.tensor, value)), None)
            if fits is not None:
                write(fits.tensor, value)
                self._state[path] = fits.tensor
                del self._values[path]
        self._watch(found_now)
        self._numbers.state |= self._numbers_restored.keys()
        missing_numbers = self._numbers.put(self._numbers_restored)
        self._numbers_restored = {path: self._numbers_restored[path] for path in missing_numbers}
        if finally_:
            missing, self._values = sorted((*self._values, *self._numbers_restored)), {}
            self._numbers_restored = {}
            self._name("missing", missing,
                       "%s: state that the script has kept in its loop, and that is not there in this process when "
                       "its first batch is taken. It begins anew: make it before, or track the object that holds "
                       "it.")  # fmt: skip

    @property
    def _objects(self) -> TrackedState:
        assert self._tracked is not None
        return self._tracked

    def _search(self) -> Found:
        tensors, objects = self._objects.owned()
        memory = {memory_key(each) for each in tensors}
        return search(frames_of(self._thread, self.error), memory, {*map(id, objects)})

    def _follow(self, found: Found) -> None:
        """Take over the tensors to which the paths of the state lead now, where the script has bound them anew."""
        present = {id(each.tensor) for each in found.tensors}
        gone = [path for path, tensor in self._state.items() if id(tensor) not in present]
        by_path = {path: each.tensor for each in found.tensors for path in (*each.others, each.path)} if gone else {}
        for path in gone:
            if path in by_path and _fits(by_path[path], self._state[path]):
                self._state[path] = by_path[path]


def _looked_after(each: FoundTensor) -> bool:
    """Return whether it is an attribute of a Lightning module or callback, whose integration restores it."""
    path, holder = each.holder or ("", None)
    bases = {package_of(kind) for kind in type(holder).__mro__}
    return bool(bases & {"lightning", "pytorch_lightning"}) and each.path.rpartition(".")[0] == path


def _fits(target: torch.Tensor, value: torch.Tensor) -> bool:
    return target.shape == value.shape and target.dtype == value.dtype
