"""Masking of likely secrets in messages that quote commands or addresses."""

from __future__ import annotations

import re

MASK = "***"

_WORD = (
    r"(?:(?:pass|api|account|sharedaccess)?key|token|secret|passw(?:or)?d|pwd|credentials?|sas|(?:sharedaccess)?signature"
    r"|sig|connection[-_]?string)"
)
_NAME = rf"(?:[^\W_]+[-_.])*(?:{_WORD})(?:[-_.\d]\w*)*"
_VALUE = r"""(?:'[^']*'|"(?:[^"\\]|\\.)*"|[^\s'";&|)]+)"""

_OPTION = re.compile(rf"(?P<said>(?<![\w-])--?{_NAME}(?:=|\s+))(?!-)(?P<value>{_VALUE})", re.IGNORECASE)
_ASSIGNED = re.compile(rf"(?P<said>\b{_NAME}=)(?P<value>{_VALUE})", re.IGNORECASE)
_QUERY = re.compile(r"(?P<said>\b[a-z][\w+.-]*://[^\s'\"?]*\?)(?P<value>[^\s'\"]+)", re.IGNORECASE)
_BEARER = re.compile(r"(?P<said>\bBearer\s+)(?P<value>[\w.~+/=-]+)", re.IGNORECASE)
_LOGIN = re.compile(r"(?P<said>\b(?:https?|wss?)://)(?P<value>[^\s/@'\"]+)(?=@)", re.IGNORECASE)


_PATTERNS = (_OPTION, _ASSIGNED, _QUERY, _LOGIN, _BEARER)


def masked(text: str) -> str:
    """Return the text with ``***`` in place of values of options and variables that are named like secrets.

    What follows ``?`` in an address, and the user in it, go too.
    """
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\g<said>{MASK}", text)
    return text


def named_secrets(text: str) -> list[str]:
    """Return what stands before each likely secret in a text, such as ``--token``; values of variables do not count."""
    found = (match for pattern in _PATTERNS for match in pattern.finditer(text))
    return sorted({match["said"].strip(" =") for match in found if not match["value"].strip("'\"").startswith("$")})
