"""``python -m azureml_elastic.engines dask -- python program.py``: what an agent starts in the place of its worker."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from importlib.util import find_spec

from azureml_elastic.config import environment as variables
from azureml_elastic.config.exit_codes import FAILED, USAGE
from azureml_elastic.engines.dask import Dask
from azureml_elastic.engines.node_engine import NodeEngine
from azureml_elastic.errors import ElasticError, MissingExtra
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.train.agent_client.channel import ChannelAgent

__all__ = ["main"]


def main() -> int:
    """Run the node's part in the cluster, and return the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    parser = argparse.ArgumentParser(prog="python -m azureml_elastic.engines")
    parser.add_argument("framework", choices=("dask",))
    parser.add_argument("--workers", type=int, default=1, help="worker processes of this node")
    parser.add_argument("program", nargs="+", metavar="-- python program.py ...", help="the program")
    arguments = parser.parse_args()
    if find_spec("distributed") is None:
        print(f"error: {MissingExtra('distributed', 'dask')}", file=sys.stderr)
        return USAGE
    agent = ChannelAgent(os.environ[variables.CHANNEL], WorkerIdentity(0, 0, 0, 0), stays=True)
    threads = max(1, len(os.sched_getaffinity(0)) // arguments.workers)
    folder = os.path.dirname(os.environ[variables.CHANNEL])  # noqa: PTH120 - the agent's temporary folder
    engine = Dask(os.environ[variables.LOCAL_ADDRESS], arguments.workers, threads, folder)
    try:
        return NodeEngine(engine, agent, arguments.program).run()
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    finally:
        agent.close()


if __name__ == "__main__":
    sys.exit(main())
