"""The outputs of the parts of a batch: how they make up those of the whole, and how they are put together.

How is learned by comparing them with the outputs of the whole batch, which then must hold the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch

from azureml_elastic.distributed.device import device_of
from azureml_elastic.train.integrations.nested import children, rebuilt
from azureml_elastic.train.integrations.script_loop.batch_layout import Path
from azureml_elastic.train.integrations.script_loop.batch_parts import IndivisibleError

_CACHES = ("past_key_values", "mems", "cache_params")
"""Outputs of language models for the generation of text, of no use in training."""


class Join(Enum):
    """How outputs of parts are put together."""

    CONCATENATED = "rows of samples, in one dimension"
    CHAINED = "lists with an item for each sample"
    LABELS = "a mean over the labels"
    SAMPLES = "a mean over the samples"
    SUM = "a sum"
    SAME = "equal for all parts"


@dataclass
class Weights:
    """The samples of each part, and their labels where those are known."""

    samples: list[int]
    labels: list[int] | None = None

    def of(self, join: Join) -> list[int] | None:
        """Return the weights of the parts in a mean."""
        if join is Join.LABELS:
            return self.labels
        return self.samples if join is Join.SAMPLES else [1] * len(self.samples)


@dataclass
class OutputLayout:
    """How the outputs of parts are put together, by their path.

    Attributes:
        zeros: paths of numbers that were zero, which shows nothing if they depend on the batch
    """

    joins: dict[Path, tuple[Join, int]] = field(default_factory=dict)
    zeros: set[Path] = field(default_factory=set)

    @property
    def reduces(self) -> bool:
        """Whether there is a mean or a sum over the samples."""
        return any(join in (Join.LABELS, Join.SAMPLES, Join.SUM) for join, _ in self.joins.values())

    def learn(self, whole: Any, parts: Sequence[Any], weights: Weights, limit: float, path: Path = ()) -> None:
        """Learn how the outputs of parts make up those of the whole batch.

        Args:
            limit: relative error by rounding

        Raises:
            IndivisibleError: they do not.
        """
        if isinstance(whole, torch.Tensor):
            self.joins[path] = self._learn_tensor(whole, parts, weights, limit, path)
            return
        held = children(whole)
        if held is None or any(type(part) is not type(whole) for part in parts):
            if not all(_same(whole, part) for part in parts):
                raise IndivisibleError(f"its outputs have a {type(whole).__name__} that differs from part to part")
            return
        parts_held = [children(part) or {} for part in parts]
        chained = isinstance(whole, (list, tuple)) and len(whole) == sum(map(len, parts_held))
        if chained and any(len(part) != len(whole) for part in parts_held):
            self.joins[path] = Join.CHAINED, 0
            if not alike(list(whole), [each for part in parts for each in part], limit):
                raise IndivisibleError(f"its outputs for a sample depend on the others{_named(path)}")
            return
        if any(part.keys() != held.keys() for part in parts_held):
            raise IndivisibleError(f"its outputs have a {type(whole).__name__} of another length for each part")
        for key, each in held.items():
            self.learn(each, [part[key] for part in parts_held], weights, limit, (*path, key))

    def _learn_tensor(
        self, whole: torch.Tensor, parts: Sequence[Any], weights: Weights, limit: float, path: Path
    ) -> tuple[Join, int]:
        if all(isinstance(part, torch.Tensor) and part.shape == whole.shape for part in parts):
            if not whole.any():
                self.zeros.add(path)
            if whole.is_floating_point() and bool(whole.isnan().any()):
                raise IndivisibleError(f"its outputs have no number{_named(path)}", always=False)
            # Labels before samples: where all samples have as many, both hold for this batch, and one for the next.
            for join in Join:
                joined = _joined_numbers(join, parts, weights)
                if joined is not None and alike(whole, joined, limit):
                    return join, 0
            number = "a number" if not whole.dim() else f"a tensor of shape {tuple(whole.shape)}"
            raise IndivisibleError(f"its outputs have {number} that is no mean over samples or labels{_named(path)}")
        for dim in range(whole.dim()):
            if _concatenable(parts, dim) and sum(part.size(dim) for part in parts) == whole.size(dim):
                joined = torch.cat(list(parts), dim)
                if joined.shape == whole.shape and alike(whole, joined, limit):
                    return Join.CONCATENATED, dim
                if joined.shape == whole.shape:
                    raise IndivisibleError(f"its outputs for a sample depend on the others{_named(path)}")
        raise IndivisibleError(f"its outputs have a tensor of shape {tuple(whole.shape)} without a row for each sample")

    def join(self, parts: Sequence[Any], weights: Weights, path: Path = ()) -> Any:
        """Return outputs of parts together.

        Raises:
            IndivisibleError: they have another structure than those that the layout was learned from.
        """
        first = parts[0]
        found, dim = self.joins.get(path, (None, 0))
        if found is Join.CHAINED:
            return rebuilt(first, [each for part in parts for each in part])
        if isinstance(first, torch.Tensor):
            if found is Join.CONCATENATED:
                if not _concatenable(parts, dim):
                    raise IndivisibleError(f"its outputs have other lengths from part to part{_named(path)}")
                return torch.cat(list(parts), dim)
            alike_ = all(isinstance(part, torch.Tensor) and part.shape == first.shape for part in parts)
            joined = _joined_numbers(found, parts, weights) if found is not None and alike_ else None
            if joined is None:
                raise IndivisibleError(f"its outputs have other tensors than before{_named(path)}")
            return joined
        held = [children(part) for part in parts]
        if held[0] is None:
            if not all(_same(first, part) for part in parts):
                raise IndivisibleError(f"its outputs have a {type(first).__name__} that differs from part to part")
            return first
        if any(part is None or part.keys() != held[0].keys() for part in held):
            raise IndivisibleError(f"its outputs have a {type(first).__name__} that differs from part to part")
        return rebuilt(
            first,
            {
                key: self.join([part[key] for part in held if part is not None], weights, (*path, key))
                for key in held[0]
            },
        )


def without_caches(output: Any) -> Any:
    """Return a model's outputs without those that only the generation of text uses."""
    if isinstance(output, Mapping) and any(name in output for name in _CACHES):
        return rebuilt(output, {key: value for key, value in output.items() if key not in _CACHES})
    return output


def _named(path: Path) -> str:
    names = [str(key) for key in path if isinstance(key, str)]
    return f" ({names[-1]})" if names else ""


def _concatenable(parts: Sequence[Any], dim: int) -> bool:
    others = {
        (*part.shape[:dim], None, *part.shape[dim + 1 :]) if isinstance(part, torch.Tensor) and part.dim() else None
        for part in parts
    }
    return len(others) == 1 and None not in others


def _joined_numbers(join: Join, parts: Sequence[torch.Tensor], weights: Weights) -> torch.Tensor | None:
    """Return tensors of equal shape together, in that shape; ``None`` where they cannot be by that."""
    if join is Join.SAME:
        return parts[0] if all(torch.equal(part, parts[0]) for part in parts) else None
    if join in (Join.CONCATENATED, Join.CHAINED) or (join is not Join.SUM and not parts[0].is_floating_point()):
        return None
    factors = weights.of(join)
    if factors is None:
        return None
    # The mean over no label is NaN, and so would be the gradient of its product with 0.
    counted = [part * factor for part, factor in zip(parts, factors, strict=True) if factor]
    if not counted:
        return parts[0]
    total = torch.stack(counted).sum(0)
    return total if join is Join.SUM else total / sum(factors)


def alike(one: Any, other: Any, limit: float) -> bool:
    """Return whether two values are the same but for a relative error by rounding."""
    if isinstance(one, torch.Tensor):
        if not isinstance(other, torch.Tensor) or one.shape != other.shape or one.dtype != other.dtype:
            return False
        if not (one.is_floating_point() or one.is_complex()):
            return torch.equal(one, other)
        finite = one.isfinite()
        if not torch.equal(finite, other.isfinite()):
            return False
        # Some devices compute in no more than 32 bits.
        exact = torch.float32 if device_of(one.device).separate else torch.float64
        wide = torch.complex128 if one.is_complex() else exact
        first, second = (torch.where(finite, each, 0).to(wide) for each in (one, other))
        # Without what is exactly the same, such as the large number in place of what a mask hides.
        unequal = first != second
        count = int(unequal.sum())
        if not count:
            return True
        scale = first[unequal].norm() + first.abs().median() * count**0.5
        return bool((first - second).norm() <= limit * scale)
    held = children(one), children(other)
    if held[0] is None or held[1] is None:
        return _same(one, other)
    return held[0].keys() == held[1].keys() and all(alike(each, held[1][key], limit) for key, each in held[0].items())


def _same(one: Any, other: Any) -> bool:
    try:
        return one is other or bool(one == other)
    except (TypeError, ValueError, RuntimeError):
        return False
