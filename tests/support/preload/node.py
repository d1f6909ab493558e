"""Runs two workers as a node does, forked from a preload server; then, with the server killed, once more."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from starting import gone, preload_server
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std

from azureml_elastic.node.agent.worker_environment import worker_environments
from azureml_elastic.node.preload.context import PreloadContext
from azureml_elastic.node.rendezvous.state.assignment import Assignment
from azureml_elastic.node.rendezvous.state.round import Member, Round


def main(script: str, folder: Path) -> None:
    server = preload_server(script, "--x", "1", options=())
    round_ = Round(state="sealed", members=(Member("node", "x", host="127.0.0.1", store_port=1, slots=2),))
    environments = worker_environments(Assignment(round_, 0, None), "run", 0)
    assert server.wait_ready(300), server.refusal
    for name in ("forked", "plain"):
        context = PreloadContext(
            server,
            name="worker",
            entrypoint=server.program.command[0],
            args=dict.fromkeys(environments, server.program.command[1:]),
            envs=environments,
            logs_specs=DefaultLogsSpecs(str(folder / name), redirects=Std.ALL, tee=Std.OUT),
            log_line_prefixes={rank: f"[worker{rank}]:" for rank in environments},
        )
        context.start()
        result = None
        while result is None:
            result = context.wait(1)
        context.close()
        codes = {rank: failure.exitcode for rank, failure in sorted(result.failures.items())}
        print(name, context.forked, codes, flush=True)
        if name == "forked":
            os.kill(server.pid, signal.SIGKILL)
            while not gone(server.pid):
                time.sleep(0.01)
    server.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
