"""The tensors that a script can reach from its stack, by path. Pure: nothing of the script's own is called.

Averages of the weights, teachers, queues and running baselines are reachable from the frames of the training thread,
in whatever object they are: a local variable, an attribute of a callback, a closure. Objects are looked into by what
Python itself keeps of them, so that no property, no ``__getattr__`` and no overridden iteration runs.
"""

from __future__ import annotations

import dis
import functools
import re
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import (
    CodeType,
    FrameType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    TracebackType,
)
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Sampler

_MOST_OBJECTS = 100_000
_MOST_ELEMENTS = 4_000
"""Elements of a container, above which it holds data."""
_DEEPEST = 20
_MOST_OTHER_PATHS = 3

_STACKS = frozenset({"accelerate", "deepspeed", "lightning", "lightning_fabric", "pytorch_lightning", "transformers"})
"""Packages whose integrations restore what their own objects hold; what these refer to is looked into."""

_OWN = "azureml_elastic"
_DATA = frozenset({"datasets", "torchdata", "webdataset"})
# They call a script as a test, and reach all other tests with what these hold.
_RUNNERS = frozenset({"pytest", "_pytest", "pluggy", "xdist", "execnet", "hypothesis"})
_HOLDERS = (SimpleNamespace,)  # of the standard library, in which scripts keep things
_TENSORS = (torch.Tensor, nn.Parameter)
_ATOMS = frozenset({int, float, complex, bool, type(None), str, bytes, bytearray, range, slice})
_CONTAINERS = frozenset({dict, OrderedDict, list, tuple, deque})
_LEFT_OUT = (ModuleType, type, Optimizer, Sampler, torch.Generator, torch.utils.data.Dataset)


@dataclass(frozen=True)
class FoundTensor:
    """A tensor and how it is reached.

    Args:
        path: path from a variable, such as ``main.ema.shadow[0]``
        others: further paths, through containers and attributes that hold what the variable does
        local: whether it is a variable itself, or in a container that a loop takes as its next element, as a batch is
        updated: whether it is one that the script computes of its former value
        buffer: whether it is a buffer of a module
        holder: path of the object in whose attributes it is, and that object
    """

    path: str
    tensor: torch.Tensor = field(repr=False)
    others: tuple[str, ...] = ()
    local: bool = False
    updated: bool = False
    buffer: bool = False
    holder: tuple[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Args:
        tensors: tensors in the order of their distance from the outermost variables
        sharded: paths of tensors of which each rank holds a part
        complete: whether there was no more to look into
        derived: the script's objects whose classes derive from those of transformers, with their paths
    """

    tensors: Sequence[FoundTensor]
    sharded: Sequence[str]
    complete: bool
    derived: Sequence[tuple[str, Any]] = ()


def frames_of(thread: int, error: BaseException | None = None) -> list[FrameType]:
    """Return the frames of a thread, outermost first; those that an error has left, which is not caught."""
    frames: list[FrameType] = []
    trace: TracebackType | None = None if error is None else error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    if error is None:
        frame: FrameType | None = sys._current_frames().get(thread)  # noqa: SLF001 - the documented way
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        frames.reverse()
    return frames


def memory_key(tensor: torch.Tensor) -> tuple[str, int]:
    """Return a key of the memory of a tensor, the same for all views of it."""
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of times that a tensor was written to; 0 for those of inference mode, which do not count."""
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001 - torch's own name of it


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value into a tensor, unseen by autograd."""
    # Inference mode alone may write to its tensors, and the version of others does not count there.
    with torch.inference_mode() if target.is_inference() else torch.no_grad():
        target.detach().copy_(value)


def search(
    frames: Iterable[FrameType], memory: Collection[tuple[str, int]] = (), objects: Collection[int] = ()
) -> Found:
    """Return the tensors that can be reached from the variables of frames.

    Args:
        frames: outermost first; only the script's own, and those of libraries that are no training stack, count
        memory: keys of memory that is tracked already
        objects: ids of objects that are tracked already, which are not looked into
    """
    return _Search(frozenset(memory), frozenset(objects)).run(frames)


@dataclass(frozen=True)
class _Item:
    """An object to look into.

    Args:
        root: path of the variable through which it was reached
        of_stack: whether it belongs to a training stack, whose own tensors are not the script's
    """

    path: str
    value: Any
    root: str
    depth: int
    of_stack: bool = False
    buffer: bool = False
    holder: tuple[str, Any] | None = None


class _Search:
    def __init__(self, memory: frozenset[tuple[str, int]], objects: frozenset[int]) -> None:
        self._memory = memory
        self._objects = objects
        self._seen: dict[int, str] = {}
        self._others: dict[str, list[str]] = {}  # other paths of what a variable holds
        self._tensors: list[_Item] = []
        self._sharded: list[str] = []
        self._derived: list[tuple[str, Any]] = []
        self._updated: set[str] = set()
        self._elements: set[str] = set()
        self._kept: list[Any] = []  # an id is that of no other object while this one lives

    def run(self, frames: Iterable[FrameType]) -> Found:
        todo: deque[_Item] = deque()
        for path, value, bindings in _variables(frames):
            todo.append(_Item(path, value, path, 0))
            name = path.rpartition(".")[2]
            if name in bindings.updated:
                self._updated.add(path)
            if name in bindings.elements:
                self._elements.add(path)
        # Breadth first: what is near to a variable gets the short path, and is found before the limit is reached.
        while todo and len(self._seen) < _MOST_OBJECTS:
            item = todo.popleft()
            if self._is_new(item):
                todo.extend(self._inside(item))
        return Found([self._found(item) for item in self._tensors], self._sharded, not todo, self._derived)

    def _found(self, item: _Item) -> FoundTensor:
        others = tuple(f"{each}{item.path.removeprefix(item.root)}" for each in self._others.get(item.root, ()))
        element = item.root in self._elements and item.holder is None and not others
        local = item.path == item.root or element
        return FoundTensor(item.path, item.value, others, local, item.path in self._updated, item.buffer, item.holder)

    def _is_new(self, item: _Item) -> bool:
        key = id(item.value)
        before = self._seen.get(key)
        if before is None:
            if key in self._objects:
                return False
            self._seen[key] = item.path
            self._kept.append(item.value)
            return True
        others = self._others.setdefault(before, [])
        if item.path != item.root and len(others) < _MOST_OTHER_PATHS:
            others.append(item.path)
        return False

    def _inside(self, item: _Item) -> Iterator[_Item]:
        kind = type(item.value)
        if kind in _TENSORS:
            self._note(item)
        elif issubclass(kind, torch.Tensor):
            if kind.__name__ == "DTensor" and memory_key(item.value._local_tensor) not in self._memory:  # noqa: SLF001
                self._sharded.append(item.path)
        elif item.depth < _DEEPEST and not _is_left_out(item.value, kind):
            of_stack = _is_of_stack(kind, item.of_stack)
            holds = package_of(kind) not in sys.stdlib_module_names or kind in _HOLDERS or kind.__module__ == "__main__"
            own = holds and not of_stack
            holder = (item.path, item.value) if own else item.holder
            if own and not issubclass(kind, nn.Module) and "transformers" in map(package_of, kind.__mro__):
                self._derived.append((item.path, item.value))
            try:
                parts = list(_parts(item.value, kind))
            except RuntimeError:  # another thread changes it
                return
            for name, value, buffer in parts:
                yield _Item(item.path + name, value, item.root, item.depth + 1, of_stack, buffer, holder)

    def _note(self, item: _Item) -> None:
        tensor = item.value
        usable = tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized or tensor.is_nested)
        if item.of_stack or not usable or not tensor.numel() or tensor.grad_fn is not None:
            return
        if memory_key(tensor) not in self._memory:
            self._tensors.append(item)


@dataclass(frozen=True)
class _Bindings:
    """What statements of a code object do with its variables.

    Args:
        updated: those that a statement computes of their former values
        elements: those that loops bind to each of their elements, and no statement updates
    """

    updated: frozenset[str] = frozenset()
    elements: frozenset[str] = frozenset()


def _variables(frames: Iterable[FrameType]) -> Iterator[tuple[str, Any, _Bindings]]:
    """Yield the variables of the script's frames by path, and then those of its modules; and how code binds them."""
    own: list[tuple[str, FrameType, bool]] = []
    modules: dict[str, dict[str, Any]] = {}
    for frame in frames:
        module = str(frame.f_globals.get("__name__"))
        if _is_foreign(module):
            continue
        of_module = frame.f_locals is frame.f_globals or frame.f_code.co_name == "<module>"
        own.append((module if of_module else frame.f_code.co_name, frame, of_module))
    # Numbered from the innermost: an error has left only the frames within that which catches it.
    labels = Counter(label for label, _, _ in own)
    outer = labels.copy()
    for label, frame, of_module in own:
        prefix = label if outer[label] == 1 else f"{label}#{outer[label]}"
        outer[label] -= 1
        yield from _named(prefix, frame.f_locals, _bindings_of(frame.f_code))
        if not of_module:
            modules[str(frame.f_globals.get("__name__"))] = frame.f_globals
    for module, names in modules.items():
        if module not in labels:
            yield from _named(module, names, _Bindings())


@functools.lru_cache(maxsize=256)
def _bindings_of(code: CodeType) -> _Bindings:
    """Return how variables are bound; one is updated that a statement stores after it has loaded it, ``a = a + b``."""
    updated: set[str] = set()
    elements: set[str] = set()
    loaded: set[str] = set()
    stores = of_loop = False
    for each in dis.get_instructions(code):
        # One instruction may load and store several variables.
        names = each.argval if isinstance(each.argval, tuple) else (each.argval,)
        kinds = re.findall(r"(LOAD|STORE)_(?:FAST|NAME|GLOBAL|DEREF)", each.opname)
        of_loop = each.opname == "FOR_ITER" or (of_loop and ("UNPACK" in each.opname or "STORE" in kinds))
        for kind, name in zip(kinds, names, strict=False):
            if kind == "STORE":
                stores = True
                updated |= {name} & loaded
                elements |= {name} if of_loop else set()
            elif stores:  # of the next statement
                stores, loaded = False, {name}
            else:
                loaded.add(name)
    return _Bindings(frozenset(updated), frozenset(elements - updated))


def _named(prefix: str, names: dict[str, Any], bindings: _Bindings) -> Iterator[tuple[str, Any, _Bindings]]:
    for name, value in list(names.items()):
        if not name.startswith("__") and type(value) not in _ATOMS:
            yield f"{prefix}.{name}", value, bindings


def _is_foreign(module: str) -> bool:
    """Return whether a module is neither the script's nor one of a library that it trains with."""
    package = module.partition(".")[0]
    return package in (_OWN, "torch", "wrapt", *_STACKS, *_RUNNERS) or _is_of_library(package)


def _is_of_library(package: str) -> bool:
    return package in sys.stdlib_module_names and package != "__main__"


def _is_left_out(value: Any, kind: type) -> bool:
    if issubclass(kind, _LEFT_OUT):
        return True
    if kind is FunctionType:
        return str(value.__module__).partition(".")[0] == _OWN
    if issubclass(kind, nn.Module):
        return False
    module = str(kind.__module__)
    package = module.partition(".")[0]
    if module.startswith("torch.utils.data") or package in (_OWN, "wrapt", *_DATA, *_RUNNERS):
        return True
    containers = (dict, list, tuple, deque, MethodType, GeneratorType, functools.partial, *_HOLDERS)
    return _is_of_library(package) and not issubclass(kind, containers)


def package_of(kind: type) -> str:
    """Return the package that defines a class."""
    return str(kind.__module__).partition(".")[0]


@functools.cache
def set_by_stacks(kind: Any) -> frozenset[str]:
    """Return the attributes that methods of a class's bases set, where these are a stack's or torch's."""
    names: set[str] = set()
    for base in kind.__mro__:
        if package_of(base) in _STACKS or issubclass(nn.Module, base):
            for member in base.__dict__.values():
                if isinstance(member, FunctionType):
                    names |= _stored(member.__code__)
    return frozenset(names)


def _stored(code: CodeType) -> set[str]:
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    own = {each.argval for each in dis.get_instructions(code) if each.opname == "STORE_ATTR"}
    return own.union(*map(_stored, inner))


def _is_of_stack(kind: type, holder_is: bool) -> bool:
    package = package_of(kind)
    if issubclass(kind, nn.Module):
        return package in _STACKS and package != "transformers"  # whose modules are models
    if package in _STACKS or package == "torch":
        return True
    return holder_is and _is_of_library(package)  # a container of its


def _parts(value: Any, kind: type) -> Iterator[tuple[str, Any, bool]]:
    """Yield the objects that one refers to: the end of their paths, and whether they are buffers of a module."""
    if issubclass(kind, dict):
        if dict.__len__(value) <= _MOST_ELEMENTS:
            yield from _elements((key, each) for key, each in dict.items(value) if type(key) in (str, int))
    elif issubclass(kind, (list, tuple, deque)):
        own = next(base for base in (list, tuple, deque) if issubclass(kind, base))
        if own.__len__(value) <= _MOST_ELEMENTS:
            yield from _elements(enumerate(own.__iter__(value)))
    elif kind is FunctionType:
        names = value.__code__.co_freevars
        for name, cell in zip(names, value.__closure__ or (), strict=False):
            try:
                yield f"<{name}>", cell.cell_contents, False
            except ValueError:  # not bound yet
                continue
        yield from _elements(enumerate(value.__defaults__ or ()))
    elif kind is MethodType:
        yield ".__self__", value.__self__, False
    elif kind is functools.partial:
        yield from ((f".{name}", getattr(value, name), False) for name in ("func", "args", "keywords"))
    elif kind is GeneratorType:
        frame = value.gi_frame
        if frame is not None and not _is_foreign(str(frame.f_globals.get("__name__"))):
            yield from ((f"<{name}>", each, False) for name, each in list(frame.f_locals.items()))
    yield from _attributes(value, kind)


def _elements(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, Any, bool]]:
    return ((f"[{key!r}]", each, False) for key, each in list(pairs) if not _is_nothing(each))


def _is_nothing(value: Any) -> bool:
    """Return whether nothing is to be looked into, as most attributes of modules are; for speed alone."""
    kind = type(value)
    return kind in _ATOMS or kind is set or (kind in _CONTAINERS and not kind.__len__(value))


def own_attributes(value: Any) -> dict[str, Any]:
    """Return the attributes that an object itself has, in slots or in its dictionary."""
    kind, found = type(value), {}
    for base in kind.__mro__:
        for name, member in base.__dict__.items() if "__slots__" in base.__dict__ else ():
            if type(member) is MemberDescriptorType:
                try:
                    found[name] = member.__get__(value, kind)
                except AttributeError:  # not set
                    continue
    try:
        names = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return found
    return {**found, **names} if type(names) is dict else found


def _attributes(value: Any, kind: type) -> Iterator[tuple[str, Any, bool]]:
    of_module = issubclass(kind, nn.Module)
    for name, each in own_attributes(value).items():
        if of_module and name in ("_parameters", "_buffers", "_modules") and isinstance(each, dict):
            yield from ((f".{part}", inner, name == "_buffers") for part, inner in list(each.items()))
        elif not _is_nothing(each) and not (type(each) in _TENSORS and name in set_by_stacks(kind)):
            yield f".{name}", each, False
