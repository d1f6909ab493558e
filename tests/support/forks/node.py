"""Runs two workers as a node does, forked from a preload server; then, with the server killed, once more."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from starting import preload_server

from azureml_elastic.node.agent.worker_group import worker_environments
from azureml_elastic.node.agent.worker_processes import WorkerSet
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.rendezvous.link import Assignment


def main(script: str, folder: Path) -> None:
    server = preload_server(script, "--x", "1", options=())
    round_ = Round(state="sealed", members=(Member("node", "x", host="127.0.0.1", store_port=1, slots=2),))
    environments = {
        local_rank: {**os.environ, **own}
        for local_rank, own in worker_environments(Assignment(round_, 0, None), "run", 0).items()
    }
    prefixes = {local_rank: f"[worker{local_rank}]:" for local_rank in environments}
    assert server.wait_ready(300), server.refusal
    for name in ("forked", "plain"):
        workers = WorkerSet(server.program, folder / name, environments, prefixes)
        workers.start(server)
        while not workers.exit_codes:
            time.sleep(0.01)
        workers.terminate()
        workers.close(30)
        codes = {local_rank: failure.exitcode for local_rank, failure in workers.failures().items()}
        print(name, workers.forked, codes, flush=True)
        if name == "forked":
            os.kill(server.pid, signal.SIGKILL)
            server.close()  # or another process takes its place, and may have made the imports by then


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
