"""Requests and answers of HTTP as plain data, so that the servers' decisions need no socket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Answer", "Request", "document", "refusal"]


@dataclass(frozen=True)
class Request:
    """One call.

    Args:
        method: of HTTP.
        host: that it was made to, without a port.
        target: the path with its query, as it was sent.
        headers: with names in lower case.
        body: all of it.
    """

    method: str
    host: str
    target: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def path(self) -> str:
        """The path, decoded."""
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, list[str]]:
        """The query's values by their names."""
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)

    def json(self) -> Any:
        """Return the body as a document; an empty one for no body.

        Raises:
            ValueError: the body is no JSON.
        """
        return json.loads(self.body) if self.body else {}


@dataclass(frozen=True)
class Answer:
    """What is said to a call."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


def document(content: Any, status: int = 200) -> Answer:
    """Return an answer with a JSON document."""
    return Answer(status, (("Content-Type", "application/json"),), json.dumps(content).encode())


def refusal(status: int, code: str, message: str) -> Answer:
    """Return an error as Azure's services write it."""
    return document({"error": {"code": code, "message": message}}, status)
