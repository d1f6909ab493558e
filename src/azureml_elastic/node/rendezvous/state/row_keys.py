"""The keys of the rendezvous' rows: chosen so that one query reads all of them, and a shorter one enough to begin with.

::

    round.0           the round
    round.0.<node>    a node that is a landmark: about one in thirty, by a hash of its name
    round.1.<node>    any other node

A node that comes needs to know the round and any one other node, at whose hub it is told the rest. If everyone read all
rows for that, a thousand nodes would read a million. They read the round and its landmarks, some thirty rows, and meet
at a landmark; only where there is none, which takes few nodes, they read all.
"""

from __future__ import annotations

import zlib

__all__ = ["ALL_PREFIX", "LANDMARK_PREFIX", "MEMBER_PREFIX", "ROUND_KEY", "is_landmark", "member_key", "node_of"]

ROUND_KEY = "round.0"

ALL_PREFIX = "round."
"""Of the round and all nodes."""

LANDMARK_PREFIX = ROUND_KEY
"""Of the round and the landmarks."""

MEMBER_PREFIX = "round.1."
"""Of the nodes that are no landmarks."""

_ONE_IN = 32


def is_landmark(node: str) -> bool:
    """Return whether nodes should rather meet at this one's hub than at another's."""
    return zlib.crc32(node.encode("utf-8", "surrogatepass")) % _ONE_IN == 0


def member_key(node: str) -> str:
    """Return the key of a node's row."""
    return f"{ALL_PREFIX}{0 if is_landmark(node) else 1}.{node}"


def node_of(key: str) -> str | None:
    """Return the node whose row has this key, ``None`` for a key that is no node's."""
    for kind in "01":
        prefix = f"{ALL_PREFIX}{kind}."
        if key.startswith(prefix):
            return key[len(prefix) :]
    return None
