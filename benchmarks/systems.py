"""How a node of each system is started, each with the settings that serve it best on one machine."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from peers import CONNECTION_VARIABLE, ONE_ROW

from azureml_elastic.config import (
    CheckpointPolicy,
    ElasticDistribution,
    ElasticResources,
    Plan,
    PreemptionPolicy,
    Recovery,
    TableRendezvous,
)
from azureml_elastic.environment import names
from azureml_elastic.local.azurite import Azurite

__all__ = ["C10D", "IN_PROCESS", "OURS", "ROW", "SYSTEMS", "TORCHRUN_SETTINGS", "Nodes"]

HERE = Path(__file__).parent
MINIMUM, MAXIMUM = 2, 3

OURS = "azureml-elastic"
IN_PROCESS = "azureml-elastic, in process"
C10D = "torchrun, c10d"
ROW = "torchrun, one table row"

TORCHRUN_SETTINGS = {
    "last_call_timeout": "1",  # the smallest that torch takes; 30 by default
    "keep_alive_interval": "1",  # a dead node is noticed after 3 s as it is by ours; 5 and so 15 s by default
    "keep_alive_max_attempt": "3",
}


@dataclass(frozen=True)
class Nodes:
    """Command and environment that start a node.

    Args:
        argv: command line of every node.
        variables: function that returns the additional environment variables of a node by its name.
        counts_steps: whether the training script counts the steps of the whole run.
    """

    argv: tuple[str, ...]
    variables: Callable[[str], Mapping[str, str]]
    counts_steps: bool = False

    def environment(self, node: str, steps: Path) -> dict[str, str]:
        """Return a node's whole environment.

        Args:
            node: node name.
            steps: folder in which the training script records its steps.
        """
        own = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "BENCH_NODE": node, "BENCH_STEPS": str(steps)}
        return {**os.environ, **own, **self.variables(node)}


def _ours(recovery: Recovery) -> Callable[[Path, Azurite], AbstractContextManager[Nodes]]:
    @contextlib.contextmanager
    def started(folder: Path, azurite: Azurite) -> Iterator[Nodes]:
        plan = Plan(
            resources=ElasticResources(min_instance_count=MINIMUM, max_instance_count=MAXIMUM),
            distribution=ElasticDistribution(process_count_per_instance=1, recovery=recovery),
            preemption=PreemptionPolicy(scheduled_events=None),
            rendezvous=TableRendezvous(endpoint=azurite.endpoint),
            checkpoint=CheckpointPolicy(path=str(folder / "checkpoints")),
            name=f"bench-{secrets.token_hex(4)}",
        )
        shared = {
            names.PLAN: plan.to_json(),
            names.RUN_DIR: str(folder / "run"),
            names.LOCAL_ADDRESS: "127.0.0.1",
            "BENCH_SESSION": "1",
        }
        argv = (sys.executable, "-m", "azureml_elastic.node", "--", "python", str(HERE / "training.py"))
        yield Nodes(argv, lambda node: {**shared, names.NODE_ID: node}, counts_steps=True)

    return started


def _torchrun(backend: str, settings: Mapping[str, str]) -> Callable[[Path, Azurite], AbstractContextManager[Nodes]]:
    @contextlib.contextmanager
    def started(_: Path, azurite: Azurite) -> Iterator[Nodes]:
        from torch.distributed import TCPStore

        # In this process, which no benchmark kills: in a cluster, a machine of its own that is never lost.
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        argv = (
            *(sys.executable, str(HERE / "peers.py")),
            *("--rdzv-backend", backend),
            *("--rdzv-endpoint", f"127.0.0.1:{store.port}"),
            *("--rdzv-id", f"bench-{secrets.token_hex(4)}"),
            *("--rdzv-conf", ",".join(f"{name}={value}" for name, value in settings.items())),
            *("--nnodes", f"{MINIMUM}:{MAXIMUM}"),
            *("--nproc-per-node", "1"),
            *("--max-restarts", "100"),
            *("--monitor-interval", "0.1"),
            *("--local-addr", "127.0.0.1"),
            str(HERE / "training.py"),
        )
        # With the shared store, torch never admits a new node to a running job.
        variables = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", CONNECTION_VARIABLE: azurite.connection_string}
        yield Nodes(argv, lambda _: variables)
        del store

    return started


SYSTEMS: Mapping[str, Callable[[Path, Azurite], AbstractContextManager[Nodes]]] = {
    OURS: _ours("restart"),
    IN_PROCESS: _ours("in_process"),
    C10D: _torchrun("c10d", {"is_host": "false", **TORCHRUN_SETTINGS}),
    ROW: _torchrun(ONE_ROW, TORCHRUN_SETTINGS),
}
"""Context managers, by system, that open the shared services of the nodes and return how to start a node."""
