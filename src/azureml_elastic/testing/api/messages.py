"""HTTP requests and responses as plain data, so that handlers need no socket."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

__all__ = ["Answer", "Request", "document", "refusal"]


@dataclass(frozen=True)
class Request:
    """An HTTP request, with the path and query as sent, and headers by lower-case name."""

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
        """Query values by name."""
        return parse_qs(urlsplit(self.target).query, keep_blank_values=True)

    def json(self) -> Any:
        """Return the body as a JSON document, empty for an empty body."""
        return json.loads(self.body) if self.body else {}


@dataclass(frozen=True)
class Answer:
    """An HTTP response."""

    status: int
    headers: tuple[tuple[str, str], ...] = ()
    body: bytes = b""


def document(content: Any, status: int = 200) -> Answer:
    """Return a response with a JSON document."""
    return Answer(status, (("Content-Type", "application/json"),), json.dumps(content).encode())


def refusal(status: int, code: str, message: str) -> Answer:
    """Return an error response in the format of Azure's services."""
    return document({"error": {"code": code, "message": message}}, status)
