"""What of a collated batch belongs to which of its samples: learned from samples that are collated together and apart.

A tensor whose parts are found in it side by side, in one of its dimensions, has its samples there. Where a part is
shorter in other dimensions, these are padded. Random values, such as the masks of a language model, are found nowhere;
then the sizes alone must tell the dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from azureml_elastic.checkpoint.state import random_state
from azureml_elastic.train.data.parted_batches import copied_samples
from azureml_elastic.train.integrations.nested import attributes, children

PROBED = 9
"""Samples from which a layout is learned: parts of 4 and 5, which differ from each other and from the whole."""

Path = tuple[Hashable, ...]


class Kind(Enum):
    """How a part of a batch is got from the whole."""

    CUT = "a tensor is cut in one dimension"
    ITEMS = "a list has an item for each sample"
    SAME = "it does not depend on the samples"
    NESTED = "by what it holds"
    COLLATED = "by collating the part alone"


@dataclass(frozen=True)
class Rule:
    """The kind of a value within a batch, with the dimension of its samples if it is cut."""

    kind: Kind
    dim: int = 0


@dataclass
class BatchLayout:
    """The rules for all values within the batches of a loader, by their path.

    Args:
        differs: whether a part that is collated alone is another one than what is cut from the whole
        random: whether the same samples are collated to different batches
        sizes: those of the tensors that are cut, in dimensions without samples
    """

    rules: dict[Path, Rule]
    differs: bool = False
    random: bool = False
    sizes: dict[Path, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def learn(cls, collate: Callable[[list[Any]], Any], read: Callable[[], list[Any]]) -> BatchLayout:
        """Learn the layout from some samples; without any rule if there are too few, or they cannot be collated."""
        layout = cls({})
        try:
            samples = read()
            samples = samples[: len(samples) - (len(samples) % 2 == 0)]
            half = len(samples) // 2
            if not half:
                return layout
            groups = (samples, samples, samples[:half], samples[half:])
            with random_state.kept():
                whole, again, *parts = (collate(copied_samples(each)) for each in groups)
            layout.random = not _equal(whole, again)
            layout._learn((), whole, parts, [0, half, len(samples)], again)
            pairs = [collate(copied_samples(samples[start : start + 2])) for start in range(0, len(samples) - 1, 2)]
            layout.differs = layout.differs or any(map(layout._has_other_sizes, pairs))
        except Exception:  # noqa: BLE001 - of any code of the script's; what is computed of a batch may show its samples
            return cls({})
        return layout

    def needs_parts(self, whole: Any) -> bool:
        """Return whether parts that are collated alone may be others than those that are cut from a batch."""
        return not self.random and (self.differs or self._has_other_sizes(whole))

    def _has_other_sizes(self, batch: Any) -> bool:
        return any(_other(at(batch, path), self.rules[path].dim) != sizes for path, sizes in self.sizes.items())

    def fits(self, whole: Any, parts: Sequence[Any], edges: Sequence[int]) -> bool:
        """Return whether parts of a batch hold the same as what would be cut from it, but for padding."""
        return all(
            _is_cut(at(whole, path), [at(part, path) for part in parts], edges, rule.dim)
            for path, rule in self.rules.items()
            if rule.kind is Kind.CUT
        )

    def _learn(self, path: Path, whole: Any, parts: Sequence[Any], edges: Sequence[int], again: Any) -> None:
        rule = self.rules[path] = _rule(whole, parts, edges, again)
        if rule.kind is Kind.CUT:
            self.sizes[path] = _other(whole, rule.dim)
        elif rule.kind is Kind.NESTED:
            for key, each in (children(whole) or {}).items():
                self._learn((*path, key), each, [at(part, (key,)) for part in parts], edges, at(again, (key,)))
        elif rule.kind is Kind.COLLATED:
            self.differs = True
            for key, each in attributes(whole).items():  # of a graph
                if all(key in attributes(part) for part in (*parts, again)):
                    self._learn((*path, key), each, [at(part, (key,)) for part in parts], edges, at(again, (key,)))


def at(value: Any, path: Path) -> Any:
    """Return what a batch holds at a path.

    Raises:
        KeyError: it holds nothing there.
    """
    for key in path:
        held = children(value)
        value = (attributes(value) if held is None else held)[key]
    return value


def _rule(whole: Any, parts: Sequence[Any], edges: Sequence[int], again: Any) -> Rule:
    if any(type(part) is not type(whole) for part in parts):
        return Rule(Kind.COLLATED)
    if all(_equal(part, whole) for part in parts):
        return Rule(Kind.SAME)
    sizes = [stop - start for start, stop in itertools.pairwise(edges)]
    if isinstance(whole, torch.Tensor):
        if any(part.dim() != whole.dim() for part in parts):
            return Rule(Kind.COLLATED)
        random = not _equal(whole, again)
        found = [
            dim
            for dim in range(whole.dim())
            if whole.size(dim) == edges[-1]
            and [part.size(dim) for part in parts] == sizes
            and (random or _is_cut(whole, parts, edges, dim))
        ]
        return Rule(Kind.CUT, found[0]) if len(found) == 1 else Rule(Kind.COLLATED)
    held = children(whole)
    if held is None:
        return Rule(Kind.COLLATED)
    if isinstance(whole, (list, tuple)) and [len(part) for part in parts] == sizes and len(whole) == edges[-1]:
        joined = [each for part in parts for each in part]
        same = _equal(list(whole), joined) or not _equal(whole, again)
        return Rule(Kind.ITEMS if same else Kind.COLLATED)
    alike = all((children(part) or {}).keys() == held.keys() for part in parts)
    return Rule(Kind.NESTED if alike else Kind.COLLATED)


def _other(tensor: torch.Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])


def _is_cut(whole: torch.Tensor, parts: Sequence[torch.Tensor], edges: Sequence[int], dim: int) -> bool:
    """Return whether parts stand side by side in a tensor, in dimension ``dim``; others may be padded at an end."""
    for start, part in zip(edges, parts, strict=False):
        piece = whole.narrow(dim, start, part.size(dim))
        if part.dim() != whole.dim() or any(own > all_ for own, all_ in zip(part.shape, piece.shape, strict=True)):
            return False
        begin, end = piece, piece
        for other, size in enumerate(part.shape):
            begin, end = begin.narrow(other, 0, size), end.narrow(other, end.size(other) - size, size)
        if not (_equal(begin, part) or _equal(end, part)):
            return False
    return True


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    held = children(one), children(other)
    if held[0] is not None and held[1] is not None:
        return held[0].keys() == held[1].keys() and all(_equal(each, held[1][key]) for key, each in held[0].items())
    try:
        if bool(one == other):
            return True
    except (TypeError, ValueError, RuntimeError):
        pass
    own = attributes(one)
    return bool(own) and _equal(own, attributes(other))
