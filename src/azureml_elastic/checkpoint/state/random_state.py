"""Saving and restoring the random number generators of a process.

A rank continues its own sequences: those of torch on CPU and GPU, of Python's ``random``, and of NumPy's global
generator where NumPy is loaded. A new rank starts sequences that are seeded by checkpoint and rank. Generators that a
script creates are not included; it can track them.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import xxhash

from azureml_elastic.distributed.device import device_of
from azureml_elastic.errors import CheckpointDamaged

_PREFIX = "$random/"

_BYTES = 1 << 15
"""Fixed size of the tensor, so that the plan of a checkpoint stays valid; NumPy and Python take 7 KB, torch 5 KB."""


def tensor_name(rank: int) -> str:
    """Return the name of the tensor with a rank's generators."""
    return f"{_PREFIX}{rank}"


def is_tensor_name(name: str) -> bool:
    """Return whether a tensor of this name holds the generators of a rank."""
    return name.startswith(_PREFIX)


def capture(device: torch.device) -> torch.Tensor:
    """Return the state of all generators, including that of this device, as uint8 (32,768,) on the CPU.

    Raises:
        ValueError: it takes more bytes.
    """
    document: dict[str, Any] = {"torch": _to_text(torch.get_rng_state()), "python": random.getstate()}
    own = device_of(device).random_state()
    if own is not None:
        document["device"] = _to_text(own)
    numpy = _numpy_random()
    if numpy is not None:
        kind, keys, *rest = numpy.get_state()
        document["numpy"] = [kind, keys.tolist(), *rest]
    text = json.dumps(document, separators=(",", ":")).encode()
    if len(text) > _BYTES:
        raise ValueError(f"the state of the random number generators has {len(text)} bytes, more than {_BYTES}")
    return torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8)  # JSON may end with spaces


def restore(state: torch.Tensor, device: torch.device) -> None:
    """Restore what :func:`capture` returned, uint8 (bytes,), except for generators that this process does not have.

    Raises:
        CheckpointDamaged: the content is not such a state.
    """
    try:
        document = json.loads(bytes(state.tolist()))
        version, words, gauss = document["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(_from_text(document["torch"]))
        if "device" in document:
            device_of(device).set_random_state(_from_text(document["device"]))
        numpy = _numpy_random()
        if numpy is not None and "numpy" in document:
            numpy.set_state(tuple(document["numpy"]))
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointDamaged(f"The state of the random number generators cannot be used: {error!r}") from error


def begin(*key: object) -> None:
    """Seed all generators with a key, such as a checkpoint and a rank."""
    seed = seed_of(*key)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)  # seeds the accelerators as well
    else:
        torch.default_generator.manual_seed(seed)  # the other formats a stack trace for each kind that is not there
    random.seed(seed)
    numpy = _numpy_random()
    if numpy is not None:
        numpy.seed(seed & 0xFFFFFFFF)  # it takes 32 bits


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Restore the generators of the CPU at the end of the block."""
    restore_all = remembered(torch.device("cpu"))
    try:
        yield
    finally:
        restore_all()


def remembered(device: torch.device) -> Callable[[], None]:
    """Return a function that restores the generators to their present state, including that of this device."""
    numpy, own = _numpy_random(), device_of(device).random_state()
    states = torch.get_rng_state(), random.getstate(), numpy and numpy.get_state()

    def restore_all() -> None:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.set_state(states[2])
        if own is not None:
            device_of(device).set_random_state(own)

    return restore_all


def _numpy_random() -> ModuleType | None:
    """Return NumPy's module of random numbers, which NumPy loads when it is first used; ``None`` without NumPy."""
    if "numpy" not in sys.modules:
        return None
    return sys.modules.get("numpy.random") or importlib.import_module("numpy.random")


def seed_of(*key: object) -> int:
    """Return a seed of 64 bits, the same for the same key."""
    return xxhash.xxh3_64_intdigest("\0".join(map(str, key)).encode())


def _to_text(state: torch.Tensor) -> str:  # uint8 (bytes,)
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def _from_text(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
