"""The batch that a script has, and the parts of it that the arguments of a model hold.

An argument that *is* a part of the batch is known by identity, and what it has of each sample by the layout of the
loader's batches. One that the script has computed is cut in the one dimension that has the batch's number of samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from azureml_elastic.train.data.loader import to_device
from azureml_elastic.train.data.parted_batches import edges_of_parts
from azureml_elastic.train.data.position import MicroBatch
from azureml_elastic.train.integrations.nested import attributes, children, rebuilt, tensors_of
from azureml_elastic.train.integrations.script_loop.batch_layout import BatchLayout, Kind, Path, Rule, at

IGNORED_LABEL = -100

_PLAIN = (str, bytes, int, float, complex, bool, type(None))

_Piece = Callable[[int, int, int | None], Any]
"""Returns what a value has of the samples from one to another; by index, of a part that is collated alone."""


class IndivisibleError(Exception):
    """A forward pass cannot be divided, for the reason in the message.

    Args:
        always: whether that holds for all passes with such arguments
    """

    def __init__(self, reason: str, *, always: bool = True) -> None:
        super().__init__(reason)
        self.always = always


@dataclass(frozen=True)
class _Known:
    """A value within the batch.

    Args:
        item: index of the sample that it belongs to, where it is within a list of samples
        version: counter of torch for changes of a tensor in place, when the script received it
    """

    value: Any
    path: Path
    rule: Rule | None
    item: int | None
    version: int | None


class CurrentBatch:
    """The batch that the script has.

    Args:
        limit: samples of a part

    Attributes:
        samples: their number, ``None`` where it is not known
        busy: whether a forward pass is computed in parts, so that models within it are not divided once more
    """

    def __init__(self, limit: int, device: torch.device) -> None:
        self.limit = limit
        self.device = device
        self.samples: int | None = None
        self.busy = False
        self.layout = BatchLayout({})
        self._known: dict[int, _Known] = {}
        self._parts: list[Any] | None = None
        self._copied: dict[int, Any] = {}  # parts on the device

    def take(self, batch: Any, micro: MicroBatch | None) -> None:
        """Take the batch that the script is about to receive; ``None`` for one that is not trained."""
        self._known, self._copied, self._parts = {}, {}, None
        self.samples = None if micro is None else micro.samples
        if self.samples is not None and self.samples > self.limit:
            assert micro is not None
            self._parts = None if micro.parts is None else list(micro.parts)
            # Now: the script may change it in place before a model gets it.
            self._note(batch, (), None)

    def _note(self, value: Any, path: Path, item: int | None) -> None:
        if isinstance(value, _PLAIN) or id(value) in self._known:
            return
        rule = self.layout.rules.get(path) if item is None else None
        self._known[id(value)] = _Known(value, path, rule, item, _version(value))
        held = children(value)
        for index, (key, each) in enumerate((attributes(value) if held is None else held).items()):
            of_items = rule is not None and rule.kind is Kind.ITEMS
            self._note(each, (*path, key), index if of_items else item)

    @contextlib.contextmanager
    def divided(self) -> Iterator[None]:
        """Compute a forward pass in parts."""
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    def known(self, value: Any) -> _Known | None:
        """Return what is known of a value that is a part of the batch."""
        found = self._known.get(id(value))
        return found if found is not None and found.value is value else None

    def untouched(self, value: Any) -> bool:
        """Return whether a value is what the script has received, with all that it holds."""
        found = self.known(value)
        if found is None:
            return isinstance(value, _PLAIN)
        if _version(value) != found.version:
            return False
        held = children(value)
        for key, each in (attributes(value) if held is None else held).items():
            inner = self.known(each)
            if not self.untouched(each) or (inner is not None and inner.path != (*found.path, key)):
                return False
        return True

    def dims_of(self, shape: torch.Size) -> set[int]:
        """Return in which dimension the tensors of a shape within the batch have the samples."""
        found = (each for each in self._known.values() if isinstance(each.value, torch.Tensor))
        rules = (each.rule for each in found if each.value.shape == shape)
        return {rule.dim for rule in rules if rule is not None and rule.kind is Kind.CUT}

    @property
    def has_parts(self) -> bool:
        """Whether its parts were collated by themselves, too."""
        return self._parts is not None

    def collated(self, index: int, path: Path) -> Any:
        """Return what a part that was collated alone holds at a path."""
        assert self._parts is not None
        if index not in self._copied:
            self._copied[index] = to_device(self._parts[index], self.device)
        return at(self._copied[index], path)

    def is_padded(self, path: Path, dim: int, whole: torch.Tensor) -> bool:
        """Return whether the parts of a tensor that were collated alone are shorter than those that are cut."""
        assert self._parts is not None
        parts = [at(part, path) for part in self._parts]
        return any(size != whole.size(other) for part in parts for other, size in enumerate(part.shape) if other != dim)


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else None  # noqa: SLF001


def _is_named_mask(path: Path) -> bool:
    return "mask" in str(path[-1])


@dataclass
class DividedArguments:
    """The arguments of a forward pass, of which each part of the batch has its own.

    Args:
        dims: dimensions of computed tensors that were found before, by their place among the arguments

    Attributes:
        count: samples, 0 if no argument has a row for each
        signature: classes of all arguments, and where they are cut
        alone: whether some can only be had of parts that are collated alone
        padded: whether those of such parts are shorter than what is cut
    """

    batch: CurrentBatch
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    dims: dict[Path, int]
    count: int = 0
    alone: bool = False
    padded: bool = False
    _computed: str | None = None  # what is not a part of the batch as the script has received it
    _cut: bool = False
    _signature: list[Hashable] = field(default_factory=list)
    _masks: list[tuple[Path, torch.Tensor]] = field(default_factory=list)  # that may tell what a mean is over

    def __post_init__(self) -> None:
        given = (self.args, dict(self.kwargs))
        samples = self.batch.samples
        if samples is None or not any(self._holds(each, samples) for each in (*self.args, *self.kwargs.values())):
            # Several views of each sample, or a choice of them.
            samples = next((len(each) for each in tensors_of(given) if each.dim()), 0)
        if samples <= self.batch.limit:
            return
        self.count = samples
        self._piece = self._read(given, ())
        if self.alone and (self._computed is not None or not self.batch.has_parts):
            raise IndivisibleError(
                f"{self._computed or 'its batch'} cannot be cut into samples, and is not what the loader has collated",
                always=False,
            )
        if not self._cut and not self.alone:
            self.count = 0

    @property
    def signature(self) -> Hashable:
        """What the division depends on, besides sizes and content."""
        return tuple(self._signature)

    @property
    def edges(self) -> list[int]:
        """Where the parts begin and end."""
        return edges_of_parts(self.count, self.batch.limit)

    @property
    def collatable(self) -> bool:
        """Whether all arguments may be those of parts that are collated alone."""
        return self._computed is None and self.batch.has_parts and self.count == self.batch.samples

    def part(self, start: int, stop: int, index: int | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of some samples, by index those of a part that is collated alone."""
        args, kwargs = self._piece(start, stop, index)
        return args, kwargs

    def labels(self, *, shifted: bool) -> torch.Tensor | None:
        """Return how many labels each sample has, (samples,), of which a model's loss is a mean; ``None`` without any.

        Args:
            shifted: whether the loss leaves out each sequence's first label
        """
        found = [each for each in self._masks if not (each[1].is_floating_point() or each[1].dtype == torch.bool)]
        named = next((each for each in found if each[0][-1] == "labels"), None)
        chosen = named or next((each for each in found if bool((each[1] == IGNORED_LABEL).any())), None)
        if chosen is None:
            return None
        rows = chosen[1].movedim(self.dims[chosen[0]], 0)
        if shifted and rows.dim() > 1 and named is not None:
            rows = rows[..., 1:]
        return rows.ne(IGNORED_LABEL).reshape(self.count, -1).sum(1).cpu()

    def uneven(self, labels: torch.Tensor | None) -> bool:
        """Return whether samples differ in the number of labels, or of what a mask leaves of them."""
        if labels is not None and bool((labels != labels[0]).any()):
            return True
        for path, each in self._masks:
            if each.dtype == torch.bool or _is_named_mask(path):
                counts = each.movedim(self.dims[path], 0).reshape(self.count, -1).float().sum(1)
                if bool((counts != counts[0]).any()):
                    return True
        return False

    def _holds(self, value: Any, samples: int) -> bool:
        """Return whether an argument may have something of each sample of the batch."""
        if isinstance(value, torch.Tensor) and samples in value.shape:
            return True
        if self.batch.known(value) is not None or (isinstance(value, (list, tuple)) and len(value) == samples):
            return True
        return any(self._holds(each, samples) for each in (children(value) or {}).values())

    def _read(self, value: Any, path: Path) -> _Piece:
        known = self.batch.known(value) if self.count == self.batch.samples else None
        if isinstance(value, torch.Tensor):
            return self._read_tensor(value, path, known)
        if isinstance(value, PackedSequence) and known is None:
            raise IndivisibleError("a PackedSequence has its samples one within the other")
        held = children(value)
        if held is None:
            return self._read_object(value, path, known)
        items = len(path) > 1 and isinstance(value, (list, tuple)) and self._has_items(value, known)
        self._signature.append((path, type(value), None if items else len(held)))
        if items:
            self._cut = True
            return lambda start, stop, index: rebuilt(value, value[start:stop])
        pieces = {key: self._read(each, (*path, key)) for key, each in held.items()}
        return lambda start, stop, index: rebuilt(
            value, {key: piece(start, stop, index) for key, piece in pieces.items()}
        )

    def _has_items(self, value: Any, known: _Known | None) -> bool:
        if len(value) != self.count or hasattr(value, "_fields"):
            return False
        if known is not None and known.rule is not None and known.rule.kind is Kind.NESTED:
            return False
        if all(self._is_item(each, index) for index, each in enumerate(value)):
            return True
        found = list(tensors_of(value))
        lists = any(rule.kind is Kind.ITEMS for rule in self.batch.layout.rules.values())
        if any(self.batch.known(each) for each in found) or (
            not lists and any(self.count in each.shape for each in found)
        ):
            return False  # rather a list of tensors, each of which has all samples
        self._computed = "a list"
        return True

    def _is_item(self, value: Any, index: int) -> bool:
        known = self.batch.known(value)
        if known is not None:
            return known.item == index and self.batch.untouched(value)
        held = children(value)
        return bool(held) and all(self._is_item(each, index) for each in (held or {}).values())

    def _read_tensor(self, value: torch.Tensor, path: Path, known: _Known | None) -> _Piece:
        rule = None if known is None else known.rule
        if known is not None and known.version != _version(value):
            self._computed = f"a tensor of shape {tuple(value.shape)} that the script has changed"
        dim: int | None
        if rule is not None and rule.kind is Kind.SAME:
            dim = None
        elif rule is not None and rule.kind is Kind.COLLATED:
            assert known is not None
            self.alone = True
            self._signature.append((path, "alone", value.dim(), value.dtype))
            return self._piece_of(known.path)
        elif rule is not None and rule.kind is Kind.CUT and value.size(rule.dim) == self.count:
            dim = rule.dim
        else:
            dim = self._find_dim(value, path)
            if dim is not None:
                rule, self._computed = None, f"a tensor of shape {tuple(value.shape)}"
        self._signature.append((path, dim, value.dim(), value.dtype))
        if dim is None:
            return lambda start, stop, index: value
        self._cut = True
        self.dims[path] = dim
        path_of_part = None
        if known is not None and rule is not None:
            path_of_part = known.path
            if self.batch.has_parts and self.batch.is_padded(known.path, dim, value):
                self.padded = True
        if not value.is_floating_point() or _is_named_mask(path):
            self._masks.append((path, value))
        return self._piece_of(path_of_part, value, dim)

    def _piece_of(self, path: Path | None, value: torch.Tensor | None = None, dim: int = 0) -> _Piece:
        def piece(start: int, stop: int, index: int | None) -> Any:
            if index is not None and path is not None:
                return self.batch.collated(index, path)
            if value is None:
                raise IndivisibleError(f"what it gets of samples {start} to {stop} cannot be cut from the batch")
            return value.narrow(dim, start, stop - start)

        return piece

    def _find_dim(self, value: torch.Tensor, path: Path) -> int | None:
        """Return the dimension of a computed tensor that has the samples, ``None`` if there is none.

        Where several have their number, it is the one that has had them before, or that of equal tensors of the batch.

        Raises:
            IndivisibleError: it may be one of several.
        """
        found = [dim for dim, size in enumerate(value.shape) if size == self.count]
        if len(found) <= 1:
            return found[0] if found else None
        before = {self.dims.get(path)} if path in self.dims else self.batch.dims_of(value.shape)
        if self.count != self.batch.samples:
            before = {0}  # of which the number comes
        if len(before & set(found)) == 1:
            return (before & set(found)).pop()
        raise IndivisibleError(
            f"a tensor of shape {tuple(value.shape)} has {self.count} samples in one of several dimensions",
            always=False,
        )

    def _read_object(self, value: Any, path: Path, known: _Known | None) -> _Piece:
        shown = value if isinstance(value, (str, bool, type(None))) else None
        self._signature.append((path, type(value), shown))
        if known is not None and known.rule is not None and known.rule.kind is Kind.COLLATED:
            self.alone = True
            if not self.batch.untouched(value):
                self._computed = f"a {type(value).__name__} that the script has changed"
            return self._piece_of(known.path)
        return lambda start, stop, index: value
