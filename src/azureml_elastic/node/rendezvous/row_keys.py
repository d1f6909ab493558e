"""Keys of the rendezvous' rows, and how their values are read.

The keys are chosen so that one query reads all rows, and a shorter one enough to begin with:

::

    round.0           the round
    round.0.<node>    a landmark: about one node in thirty, by a hash of its name
    round.1.<node>    any other node
    round.0!key       the run's key, with which nodes authenticate themselves to each other

A node that joins needs the round and any one other node, whose hub sends it the rest. It reads the round and the
landmarks, about thirty rows of a thousand nodes, and meets the others at a landmark's hub. Where there is no landmark
there are few nodes, and it reads all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from azureml_elastic.errors import TableError
from azureml_elastic.node.core.joining import is_landmark
from azureml_elastic.node.table import Row

_T = TypeVar("_T")

ROUND_KEY = "round.0"

RUN_KEY = "round.0!key"
"""Key of the row with the run's key, which each query of nodes reads."""

ALL_PREFIX = "round."
"""Prefix of the round and of all nodes."""

LANDMARK_PREFIX = ROUND_KEY
"""Prefix of the round and of the landmarks."""

MEMBER_PREFIX = "round.1."
"""Prefix of the nodes that are not landmarks."""


def member_key(node: str) -> str:
    """Return the key of a node's row."""
    return f"{ALL_PREFIX}{0 if is_landmark(node) else 1}.{node}"


def node_of(key: str) -> str | None:
    """Return the node whose row has this key, ``None`` for a key of another kind."""
    for kind in "01":
        prefix = f"{ALL_PREFIX}{kind}."
        if key.startswith(prefix):
            return key[len(prefix) :]
    return None


def parsed(parse: Callable[[Mapping[str, Any]], _T], row: Row) -> _T:
    """Return the row's value as what it stands for.

    Raises:
        TableError: it does not.
    """
    try:
        return parse(row.value)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TableError(
            f"Row {row.key!r} of the table holds no value of this library ({error}): another program writes to this "
            "table. Give the run a table of its own."
        ) from error
