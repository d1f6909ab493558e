"""Runs two workers under torch's local agent, from a warm process; then, the warm process being dead, once more."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from starting import gone, warm_process
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from azureml_elastic.node.warm.context import WarmAgent


def main(script: str, folder: Path) -> None:
    warm = warm_process(script, "--x", "$1", options=())
    for name in ("warm", "cold"):
        parameters = RendezvousParameters("c10d", "127.0.0.1:0", name, 1, 1, is_host=True, timeout=120)
        spec = WorkerSpec(
            role="default",
            local_world_size=2,
            entrypoint=warm.command[0],
            args=warm.command[1:],
            rdzv_handler=get_rendezvous_handler(parameters),
            max_restarts=0,
            monitor_interval=0.05,
        )
        logs = folder / name
        agent = WarmAgent(spec, DefaultLogsSpecs(str(logs), redirects=Std.ALL, tee=Std.OUT), "[${role_name}${rank}]:")
        agent.warm = warm
        result = agent.run()
        codes = {rank: failure.exitcode for rank, failure in sorted(result.failures.items())}
        print(name, getattr(agent._pcontext, "warm", False), codes, flush=True)
        if name == "warm":
            os.kill(warm.pid, signal.SIGKILL)
            while not gone(warm.pid):
                time.sleep(0.01)
    warm.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
