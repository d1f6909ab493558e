"""Rounds in messages between nodes, so that a node which receives one need not read the table.

A received round is as reliable as a read of the row a moment ago: the sender has written or read it, and the row may
have changed since. Nothing is written because of it alone, since every change of the row is a compare-and-swap after a
read.
"""

from __future__ import annotations

import base64
import json
import threading
import zlib
from functools import lru_cache

from azureml_elastic.node.rendezvous.state.round import Round

__all__ = ["LatestRound", "pack", "unpack"]


@lru_cache(maxsize=4)  # the same round goes to the node's own hub and to another one
def pack(round_: Round) -> str:
    """Return the round as text for a message.

    A thousand members are 200 KB of JSON, which a hub would encode for each of a thousand nodes; a compressed text
    without characters to escape costs almost nothing.
    """
    return base64.b64encode(zlib.compress(json.dumps(round_.to_value(), separators=(",", ":")).encode(), 1)).decode()


@lru_cache(maxsize=8)  # the same round arrives from several hubs
def unpack(text: str) -> Round:
    """Return the round that :func:`pack` has packed.

    Raises:
        ValueError: the text is not a packed round.
    """
    try:
        return Round.from_value(json.loads(zlib.decompress(base64.b64decode(text, validate=True))))
    except (zlib.error, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{text[:40]!r} is no packed round: {error}") from error


class LatestRound:
    """Newest version of the round's row that this node has read, written or received. Thread-safe.

    The table client, the hub and the connections to other hubs write to it, so that a change of the round is known
    whichever of them brings it first.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round: Round | None = None

    def observe(self, round_: Round) -> None:
        """Keep this version if it is newer."""
        with self._lock:
            if round_.is_newer_than(self._round):
                self._round = round_

    def after(self, round_: Round) -> Round | None:
        """Return the newest version if it is newer than this one."""
        latest = self._round
        return latest if latest is not None and latest.is_newer_than(round_) else None
