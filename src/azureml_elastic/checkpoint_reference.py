"""The reference to a checkpoint, which the table, the messages between worker and agent, and manifests have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Reference:
    """Reference to one checkpoint: its folder, its step and the digest of its manifest."""

    directory: str
    step: int
    digest: str

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Reference:
        """Return the reference in a JSON object, whose other fields are ignored."""
        return cls(str(document["directory"]), int(document["step"]), str(document["digest"]))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object with the fields."""
        return asdict(self)
