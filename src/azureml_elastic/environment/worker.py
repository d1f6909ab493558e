"""The environment of a worker: what the agent or torchrun sets, and what torch and the stacks read as well.

A process that stays from round to round gets new values of them with each assignment, and a script may set some itself.
What depends on the round is therefore read when it is needed, not once.
"""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.environment import names
from azureml_elastic.environment.process import Environment, Variable
from azureml_elastic.errors import PlanError, UsageError


@dataclass(frozen=True)
class Assigned:
    """Rank and world size that the agent has assigned to a worker, and the address of its round's store."""

    rank: int
    world_size: int
    host: str
    port: int


@dataclass(frozen=True)
class WorkerEnvironment(Environment):
    """The environment of a worker, also of one that torchrun or nothing has started."""

    @property
    def rank(self) -> int:
        """Rank of this process, 0 without one."""
        return self._number("RANK", 0)

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node, 0 without one."""
        return self._number("LOCAL_RANK", 0)

    @property
    def world_size(self) -> int:
        """Number of ranks, 1 without one."""
        return self._number("WORLD_SIZE", 1)

    @property
    def local_world_size(self) -> int:
        """Number of ranks of this node, 1 without one."""
        return self._number("LOCAL_WORLD_SIZE", 1)

    @property
    def round(self) -> int:
        """Number of the round, 0 for a process that is to outlive rounds or has no agent."""
        return self._number(names.ROUND, 0)

    @property
    def has_rank(self) -> bool:
        """Whether this process has a rank."""
        return "RANK" in self.variables

    @property
    def has_world_size(self) -> bool:
        """Whether this process has a world size."""
        return "WORLD_SIZE" in self.variables

    @property
    def finds_others(self) -> bool:
        """Whether everything is set by which torch finds the other ranks."""
        return not self._missing

    @property
    def master(self) -> tuple[str, int] | None:
        """Host and port of the round's store, ``None`` without one."""
        host, port = self.get("MASTER_ADDR"), self.get("MASTER_PORT")
        return (host, int(port)) if host and port else None

    @property
    def assigned(self) -> Assigned | None:
        """The rank and the store that the agent has assigned, ``None`` where the script serves a store itself."""
        words = self.variables.get(names.WORKER, "").split()
        if self.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or not words:
            return None
        return Assigned(int(words[0]), int(words[1]), words[2], int(words[3]))

    @property
    def channel(self) -> str | None:
        """Path of the agent's socket, ``None`` without an agent."""
        return self.get(names.CHANNEL)

    plan = Variable(names.PLAN)
    """The plan as JSON, ``None`` without one."""

    run_dir = Variable(names.RUN_DIR)
    """Folder for events, logs and audit files, ``None`` outside a run."""

    node = Variable(names.NODE_ID)
    """Identifier of the node where the environment gives one."""

    @property
    def history(self) -> tuple[int, float]:
        """Number of losses and seconds of training of the run before this round."""
        losses, _, seconds = self.variables.get(names.HISTORY, "0 0").partition(" ")
        return int(losses), float(seconds)

    @property
    def in_process_on_gpu(self) -> bool:
        """Whether processes with a GPU may take part in the next round."""
        return self.get(names.IN_PROCESS_ON_GPU) == "1"

    gloo_transport = Variable("GLOO_DEVICE_TRANSPORT")
    """The transport that gloo is to use, ``None`` for its default."""

    @property
    def accelerate_uses_deepspeed(self) -> bool:
        """Whether accelerate makes a DeepSpeed plugin without an argument."""
        return self.variables.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"

    @property
    def horovod_local_rank(self) -> str:
        """Horovod's rank of this process among those of its node."""
        return self.variables["HOROVOD_LOCAL_RANK"]

    @property
    def horovod_server(self) -> tuple[str, int] | None:
        """Host and port of the engine's server, ``None`` where no engine has started this process."""
        host, port = self.get("HOROVOD_GLOO_RENDEZVOUS_ADDR"), self.get("HOROVOD_GLOO_RENDEZVOUS_PORT")
        return (host, int(port)) if host and port and self.plan is not None else None

    def check(self) -> None:
        """Check that the variables belong together.

        Raises:
            PlanError: the agent's variables are incomplete.
            UsageError: a value is not a number, or ``MASTER_ADDR`` or ``MASTER_PORT`` is missing beside ``WORLD_SIZE``.
        """
        if self.world_size > 1 and self._missing:
            raise UsageError(
                f"WORLD_SIZE={self.world_size}, but {', '.join(self._missing)} is not set. Start the script with the "
                "node agent or torchrun, which set all of them, or unset WORLD_SIZE to run alone."
            )
        if self.channel is not None and names.ROUND not in self.variables:
            raise PlanError(f"{names.CHANNEL} is set without {names.ROUND}; the node's agent sets both.")

    @property
    def _missing(self) -> list[str]:
        return [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if name not in self.variables]

    def _number(self, name: str, default: int) -> int:
        text = self.variables.get(name, default)
        try:
            return int(text)
        except ValueError as error:
            raise UsageError(f"{name}={text!r} is not a whole number; the node agent or torchrun sets it.") from error
