"""Messages as frozen dataclasses: a codec per protocol turns them into JSON objects and back, and checks all types."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError

from azureml_elastic.ipc.connection import Connection

_LOG = logging.getLogger(__name__)
_M = TypeVar("_M")
_LONGEST_PROBLEM = 500

Count = Annotated[int, Field(ge=0, le=2**53)]
"""A number of something, as a field of a message."""

Name = Annotated[str, Field(max_length=1024)]
"""The name of a node, or of a process, as a field of a message."""


Text = Annotated[str, Field(max_length=1 << 14)]
"""A path or a description, as a field of a message."""

Seconds = Annotated[float, Field(ge=0, le=2**53, allow_inf_nan=False)]
"""A duration, as a field of a message."""


def _without_folder(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(f"{name!r} is not the name of a file in a folder")
    return name


FileName = Annotated[str, Field(max_length=255), AfterValidator(_without_folder)]
"""The name of a file or folder, without those that it is in, as a field of a message."""


class MalformedMessage(ValueError):
    """A JSON object that is not a message of the protocol."""


class MessageCodec(Generic[_M]):
    """Encoder and decoder of the messages of one protocol.

    A message is sent as a JSON object of the dataclass's fields, without those that have their default, and of
    ``"op"``, the class's name in snake case. The decoder ignores unknown fields, which a later release may send.
    """

    def __init__(self, *types: type[_M]) -> None:
        self._ops = {kind: re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() for kind in types}
        self._kinds = {op: kind for kind, op in self._ops.items()}
        # The adapters' own methods cost more than the conversion of a small message.
        self._dump: dict[str, Callable[..., dict[str, Any]]] = {}
        self._validate: dict[str, Callable[[Any], Any]] = {}

    def encode(self, message: _M) -> dict[str, Any]:
        """Return the JSON object to send."""
        op = self._ops[type(message)]
        if op not in self._dump:
            self._build(op)
        return {"op": op, **self._dump[op](message, mode="json", exclude_defaults=True)}

    def decode(self, fields: object) -> _M:
        """Return the message that a JSON object holds.

        Raises:
            MalformedMessage: the ``"op"`` is unknown, a field is missing, or a value has another type.
        """
        op = fields.get("op") if isinstance(fields, dict) else None
        if not isinstance(op, str) or op not in self._kinds:
            raise MalformedMessage(f"op={_shorten(repr(op))} is not one of {', '.join(self._kinds)}")
        if op not in self._validate:
            self._build(op)
        try:
            message: _M = self._validate[op](fields)
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
            raise MalformedMessage(f"{op!r} with {_shorten(problems)}") from error
        return message

    def _build(self, op: str) -> None:
        """Make the adapter of one kind, when it is first needed.

        A process uses few kinds of a protocol, and all of them cost an agent 0.1 s before it can announce its node. Two
        threads may make the same one.
        """
        adapter: TypeAdapter[Any] = TypeAdapter(self._kinds[op])
        self._validate[op] = adapter.validator.validate_python
        self._dump[op] = adapter.serializer.to_python

    def receive(self, connection: Connection, fields: Mapping[str, Any]) -> _M | None:
        """Decode what a peer sent; log a malformed message, close its connection and return ``None``."""
        try:
            return self.decode(fields)
        except MalformedMessage as error:
            _LOG.warning("Closing the connection to %s, which sent a malformed message: %s.", connection.peer, error)
            connection.close(f"the peer sent a malformed message: {error}")
            return None


def _shorten(text: str) -> str:
    return text if len(text) <= _LONGEST_PROBLEM else f"{text[:_LONGEST_PROBLEM]}..."


@dataclass(frozen=True)
class ShardDescription:
    """A shard of a snapshot.

    Args:
        file: file name of the shard in a checkpoint.
        step: optimizer steps completed.
        world_size: world size of the round that took the snapshot, which is the number of its shards.
        rank: rank whose shard it is.
        size: size of the file in bytes.
        tail: size in bytes of what follows the file: the manifest, in the shard of rank 0.
        xxh3: XXH3-128 checksum of the file, in hexadecimal digits.
        path: path of the memory or of the file on the node that holds it.
    """

    folder: FileName
    file: FileName
    step: Count
    world_size: Count
    rank: Count
    size: Count
    tail: Count
    xxh3: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    path: Text = ""
