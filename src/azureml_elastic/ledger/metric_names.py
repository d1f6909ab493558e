"""Names of metrics: those that MLflow's stores accept, so that a value that was logged can be published anywhere."""

from __future__ import annotations

import posixpath
import re

LONGEST_NAME = 250
"""Largest number of characters of a name."""

MOST_VALUES = 100
"""Largest number of values that are logged at a time."""

OWN_PREFIX = "elastic/"
"""Beginning of the names of the run's own metrics."""

ALLOWED_NAME = r"[A-Za-z0-9_\-. :/]+"
"""Regular expression of a name's characters."""

_ALLOWED = re.compile(ALLOWED_NAME)


def name_problem(name: object) -> str:
    """Return what is wrong with a name and what to write instead, as the end of a sentence; empty if it is allowed."""
    if not isinstance(name, str):
        return f"is of the type {type(name).__name__}; give a text, such as 'loss'"
    if len(name) > LONGEST_NAME:
        return f"has {len(name)} characters; give at most {LONGEST_NAME}"
    if not _ALLOWED.fullmatch(name):
        suggestion = re.sub(r"[^A-Za-z0-9_\-. :/]", "_", name) or "loss"
        return f"has other characters than letters, digits, '_', '-', '.', ' ', ':' and '/'; write {suggestion!r}"
    if posixpath.normpath(name) != name or name.startswith(("/", ".")):
        return "is no relative path without empty parts and dots; write it as in 'loss/train'"
    if name.startswith(OWN_PREFIX):
        return f"begins with {OWN_PREFIX!r}, as the metrics of the run itself do; choose another prefix"
    return ""
