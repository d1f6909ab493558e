"""The environment of the process of an engine, which the agent starts in the place of its worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath

from typing_extensions import override

from azureml_elastic.environment import names
from azureml_elastic.environment.process import Environment, Variable, take

_WORKERS = frozenset({names.CHANNEL, "GROUP_RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"})
"""Variables of this process, which is a worker of the agent; its children are not."""


@dataclass(frozen=True)
class EngineEnvironment(Environment):
    """The environment of an engine; what depends on the round is replaced with each assignment."""

    @property
    def channel(self) -> str:
        """Path of the agent's socket."""
        return self.variables[names.CHANNEL]

    @property
    def folder(self) -> str:
        """The agent's temporary folder."""
        return str(PurePath(self.channel).parent)

    @property
    def host(self) -> str:
        """Address at which other nodes reach this one."""
        return self.variables[names.LOCAL_ADDRESS]

    @property
    def plan(self) -> str:
        """The plan as JSON."""
        return self.variables[names.PLAN]

    @property
    def round(self) -> str:
        """Number of the round."""
        return self.variables[names.ROUND]

    @property
    def store(self) -> tuple[str, int]:
        """Host and port of the round's store."""
        return self.variables["MASTER_ADDR"], int(self.variables["MASTER_PORT"])

    gloo_interface = Variable("GLOO_SOCKET_IFNAME")
    """Network interface of gloo, ``None`` for its default."""

    @override
    def for_child(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in self.variables.items()
            if name not in _WORKERS and not name.startswith("TORCHELASTIC_")
        }
        return {**inherited, **(variables or {})}


def take_engine_key() -> bytes:
    """Return the key that only the run's nodes have, and remove it, so that no child process inherits it."""
    return bytes.fromhex(take(names.ENGINE_KEY) or "")
