"""A round as it travels in a message from hub to hub, so that whoever hears of it need not read the table.

The word of a hub is as good as a read of the row a moment ago, and no better: the sender has written or read that row,
and by now it may have moved on. Nothing is ever written on the strength of it alone, because every move of the row is a
compare-and-swap after a read.
"""

from __future__ import annotations

import base64
import json
import zlib
from functools import lru_cache

from azureml_elastic.node.rendezvous.state.round import Round

__all__ = ["newer", "pack", "unpack"]

_ORDER = ("open", "sealed", "succeeded", "failed")


def newer(one: Round, other: Round | None) -> bool:
    """Return whether ``one`` is a later version of the row than ``other``, which may be ``None`` for none."""
    if other is None:
        return True
    return (one.number, _ORDER.index(one.state)) > (other.number, _ORDER.index(other.state))


@lru_cache(maxsize=4)  # one round goes to one's own hub and to the desk
def pack(round_: Round) -> str:
    """Return the round as text for a message.

    A thousand members take 200 KB of JSON, which a hub would encode anew for each of a thousand watchers; as one short
    text without a character to escape they cost it next to nothing.
    """
    return base64.b64encode(zlib.compress(json.dumps(round_.to_value(), separators=(",", ":")).encode(), 1)).decode()


@lru_cache(maxsize=8)  # the same word comes from several hubs
def unpack(text: str) -> Round:
    """Return the round that :func:`pack` has packed.

    Raises:
        ValueError: the text is none.
    """
    try:
        return Round.from_value(json.loads(zlib.decompress(base64.b64decode(text, validate=True))))
    except (zlib.error, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{text[:40]!r} is no packed round: {error}") from error
