"""The random number generators of a process: saved with a checkpoint, and continued after it.

A rank continues its own sequences: those of torch on its CPU and its GPU, of Python's ``random``, and of NumPy's
global generator where that is loaded. A rank that was not there before begins sequences of its own, the same whenever
it begins at that checkpoint. Generators that a script makes itself are its own to track.
"""

from __future__ import annotations

import base64
import contextlib
import json
import random
import sys
from collections.abc import Iterator
from typing import Any

import torch
import xxhash

from azureml_elastic.errors import CheckpointDamaged

__all__ = ["begin", "capture", "from_text", "is_tensor_name", "kept", "restore", "seed_of", "tensor_name", "to_text"]

_PREFIX = "$random/"

_BYTES = 1 << 15
"""A state of the same form each time is planned once; NumPy's takes about 7 KB, Python's likewise, torch's 5 KB."""


def tensor_name(rank: int) -> str:
    """Return the name under which a checkpoint holds a rank's generators."""
    return f"{_PREFIX}{rank}"


def is_tensor_name(name: str) -> bool:
    """Tell whether that is the name of some rank's."""
    return name.startswith(_PREFIX)


def capture(device: torch.device) -> torch.Tensor:
    """Return the state of all generators, as bytes.

    Args:
        device: of this process.
    """
    document: dict[str, Any] = {"torch": to_text(torch.get_rng_state()), "python": random.getstate()}
    if device.type == "cuda":
        document["cuda"] = to_text(torch.cuda.get_rng_state(device))
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        kind, keys, *rest = numpy.get_state()
        document["numpy"] = [kind, keys.tolist(), *rest]
    text = json.dumps(document, separators=(",", ":")).encode()
    if len(text) > _BYTES:
        raise ValueError(f"the state of the random number generators has {len(text)} bytes, more than {_BYTES}")
    return torch.frombuffer(bytearray(text.ljust(_BYTES)), dtype=torch.uint8)


def restore(state: torch.Tensor, device: torch.device) -> None:
    """Continue where :func:`capture` was; what this process does not have is left out.

    Raises:
        CheckpointDamaged: it is no such state.
    """
    try:
        document = json.loads(bytes(state.tolist()))
        version, words, gauss = document["python"]
        random.setstate((version, tuple(words), gauss))
        torch.set_rng_state(from_text(document["torch"]))
        if device.type == "cuda" and "cuda" in document:
            torch.cuda.set_rng_state(from_text(document["cuda"]), device)
        numpy = sys.modules.get("numpy.random")
        if numpy is not None and "numpy" in document:
            numpy.set_state(tuple(document["numpy"]))
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointDamaged(f"The state of the random number generators cannot be used: {error!r}") from error


def begin(*place: object) -> None:
    """Begin new sequences, those of a place such as a checkpoint and a rank.

    Args:
        place: what tells it from all others.
    """
    seed = seed_of(*place)
    torch.manual_seed(seed)  # of the GPUs as well
    random.seed(seed)
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed(seed & 0xFFFFFFFF)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Go on afterwards as if nothing had been drawn from the generators of the CPU."""
    numpy = sys.modules.get("numpy.random")
    states = torch.get_rng_state(), random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        if numpy is not None:
            numpy.set_state(states[2])


def seed_of(*place: object) -> int:
    """Return a seed of 64 bits, the same for the same place."""
    return xxhash.xxh3_64_intdigest(json.dumps([str(part) for part in place]).encode())


def to_text(state: torch.Tensor) -> str:
    """Return bytes as text."""
    return base64.b64encode(bytes(state.tolist())).decode("ascii")


def from_text(text: str) -> torch.Tensor:
    """Read what :func:`to_text` returned."""
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
