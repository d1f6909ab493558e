"""HTTP requests and responses as plain data, so that handlers need no socket."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

from azureml_elastic.errors import UsageError


class NotFound(UsageError):
    """A request for what the workspace does not have."""


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
        """The path, decoded; raises ``UsageError`` if the target is not a URL."""
        return unquote(self._split.path)

    @property
    def query(self) -> dict[str, str]:
        """Query values by name, of several the last one."""
        return dict(parse_qsl(self._split.query, keep_blank_values=True))

    @property
    def _split(self) -> SplitResult:
        try:
            return urlsplit(self.target)
        except ValueError as error:
            raise UsageError(f"The target {self.target!r} is not a URL: {error}.") from error

    @property
    def sdk(self) -> tuple[int, int]:
        """The release of azure-ai-ml that has sent the request; for any other client the newest."""
        release = re.match(r"azure-ai-ml/(\d+)\.(\d+)", self.headers.get("user-agent", ""))
        return (sys.maxsize, 0) if release is None else (int(release[1]), int(release[2]))

    def json(self) -> dict[str, Any]:
        """Return the body as a JSON object, empty for an empty body; raises ``UsageError`` for another body."""
        try:
            found = json.loads(self.body) if self.body else {}
        except (ValueError, RecursionError) as error:
            raise UsageError(f"The body is not JSON: {error}.") from error
        if not isinstance(found, dict):
            raise UsageError(f"The body is a JSON {type(found).__name__}. Send an object.")
        return found


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


def properties_of(body: dict[str, Any]) -> dict[str, Any]:
    """Return the properties of a document; raises ``UsageError`` if there are none."""
    found = body.get("properties")
    if not isinstance(found, dict):
        raise UsageError('The "properties" of the document are missing or not an object.')
    return found


def either(value: Mapping[str, Any], name: str) -> Any:
    """Return a field that is in camel case in jobs and in snake case in pipeline steps."""
    snake = re.sub(r"[A-Z]", lambda match: f"_{match[0].lower()}", name)
    found = value.get(name)
    return value.get(snake) if found is None else found


def unsupported(request: Request) -> Answer:
    """Return the response to a request for what the workspace does not do."""
    return refusal(405, "MethodNotAllowed", f"The local workspace does not support {request.method} {request.path}.")
