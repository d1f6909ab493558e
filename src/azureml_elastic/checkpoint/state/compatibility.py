"""Whether a checkpoint fits the tracked objects, decided from names, shapes and types before anything is read. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from azureml_elastic.errors import UsageError

_SHOWN = 3
"""Names that a message shows of each kind of difference."""


@dataclass(frozen=True)
class TensorKind:
    """Shape of a tensor, of the whole also where it is sharded, and name of its type, such as ``float32``."""

    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        """Return the form that messages show."""
        return f"{self.dtype}{list(self.shape)}"


Kinds = Mapping[str, TensorKind]


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, TensorKind]:
    """Return shapes and types by name."""
    return {
        name: TensorKind(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for name, tensor in tensors.items()
    }


def tensor_differences(stored: Kinds, present: Kinds) -> list[str]:
    """Return sentences about tensors that only one side has, and about those with another shape or type."""
    found = []
    if missing := sorted(present.keys() - stored.keys()):
        found.append(f"the checkpoint does not hold {_names(missing)}")
    if unexpected := sorted(stored.keys() - present.keys()):
        found.append(f"the script does not have {_names(unexpected)}")
    changes: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(stored.keys() & present.keys()):
        before, now = stored[name], present[name]
        if before != now:
            what = f"{before.dtype}, and now {now.dtype}" if before.shape == now.shape else f"{before}, and now {now}"
            changes[what].append(name)
    found += [f"{_names(names)} {'was' if len(names) == 1 else 'were'} {what}" for what, names in changes.items()]
    return found


def optimizer_differences(stored: Kinds, present: Kinds) -> list[str]:
    """Return sentences about the state of an optimizer of the same class.

    A parameter has no state before its first gradient, and some optimizers add to it later.
    """
    prefix = "state/"
    common = {name for name in stored.keys() & present.keys() if name.startswith(prefix)}
    return tensor_differences(
        *({name.removeprefix(prefix): each[name] for name in common} for each in (stored, present))
    )


def shape_differences(stored: Mapping[str, Sequence[int]], present: Mapping[str, Sequence[int]]) -> list[str]:
    """Return sentences about parameters that had another shape, by the shapes of those with a state and of all now."""
    changes: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(stored.keys() & present.keys()):
        if stored[name] != present[name]:
            changes[f"had the shape {stored[name]}, and now {present[name]}"].append(name)
    return [f"{_names(names)} {what}" for what, names in changes.items()]


def parameter_differences(stored: Collection[str], present: Collection[str]) -> list[str]:
    """Return a sentence about parameters whose state the checkpoint holds, and that the optimizer has no more."""
    gone = sorted(set(stored) - set(present))
    return [f"it does not optimize {_names(gone)} any more"] if gone else []


def group_differences(stored: Sequence[Collection[str]], present: Sequence[Collection[str]]) -> list[str]:
    """Return sentences about the parameter groups of an optimizer, by the names of the parameters of each."""
    if len(stored) != len(present):
        return [f"it had {len(stored)} parameter groups, and has {len(present)} now"]
    pairs = zip(stored, present, strict=True)
    kept = {name for group in present for name in group}
    moved = sorted({name for before, now in pairs for name in set(before) & kept - set(now)})
    return [f"{_names(moved)} moved to another parameter group"] if moved else []


def class_differences(stored: str | None, present: str | None) -> list[str]:
    """Return a sentence about another class, ``None`` where it is unknown or does not matter."""
    return [] if None in (stored, present) or stored == present else [f"it was a {stored}, and is a {present} now"]


def refuse(where: str, differences: Mapping[str, Collection[str]]) -> UsageError:
    """Return the error of a checkpoint that does not fit, with sentences by the name of the tracked object."""
    lines = [f"  {name}: {sentence}" for name, sentences in sorted(differences.items()) for sentence in sentences]
    names = ", ".join(repr(name) for name in sorted(differences))
    return UsageError(
        f"The checkpoint {where} does not fit this script; nothing was restored or overwritten.\n"
        + "\n".join(lines)
        + "\nRestore the former definition, start anew with an empty checkpoint folder, or keep what still fits: "
        f"run.track(..., partial=[{names}])."
    )


def _names(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN])
    return f"{shown} and {len(names) - _SHOWN} more" if len(names) > _SHOWN else shown
