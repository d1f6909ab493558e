"""``python -m azureml_elastic.engines dask -- python program.py``: what an agent starts in the place of its worker."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from azureml_elastic.config import Plan
from azureml_elastic.config.exit_codes import FAILED, USAGE
from azureml_elastic.engines.engine import Engine, NodeEngine
from azureml_elastic.environment.engine import EngineEnvironment
from azureml_elastic.errors import ElasticError, MissingExtra
from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.log_lines import write_log_lines
from azureml_elastic.train.agent_client.channel import ChannelAgent

_PACKAGES = {"dask": "distributed", "horovod": "horovod", "ray": "ray"}
"""Package of each framework, which is installed with the extra of the framework's name."""


def main() -> int:
    """Run the node's part, and return the exit code."""
    environment = EngineEnvironment.read()
    write_log_lines(environment.log_level)
    parser = argparse.ArgumentParser(prog="python -m azureml_elastic.engines")
    parser.add_argument("framework", choices=sorted(_PACKAGES))
    parser.add_argument("--workers", default="auto", help='worker processes of this node, or "auto"')
    parser.add_argument("program", nargs="+", metavar="-- python program.py ...", help="the program")
    arguments = parser.parse_args()
    if find_spec(package := _PACKAGES[arguments.framework]) is None:
        print(f"error: {MissingExtra(package, arguments.framework)}", file=sys.stderr)
        return USAGE
    agent = ChannelAgent(environment.channel, WorkerIdentity(0, 0, 0, 0), stays=True)
    workers = None if arguments.workers == "auto" else int(arguments.workers)
    try:
        engine = _engine(arguments.framework, workers, arguments.program, agent, environment)
        return NodeEngine(engine, agent).run()
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    finally:
        agent.close()


def _engine(
    framework: str, workers: int | None, program: Sequence[str], agent: ChannelAgent, environment: EngineEnvironment
) -> Engine:
    """Return the engine of a framework.

    Args:
        workers: number of worker processes of this node, ``None`` for the framework's own default.
    """
    host, folder = environment.host, environment.folder
    cpus = len(os.sched_getaffinity(0))
    if framework == "dask":
        from azureml_elastic.engines.cluster import ClusterEngine
        from azureml_elastic.engines.dask import Dask

        ports = Plan.from_json(environment.plan).rendezvous.port_range
        return ClusterEngine(Dask(host, workers or 1, max(1, cpus // (workers or 1)), folder, ports), program)
    if framework == "horovod":
        from azureml_elastic.engines.horovod.engine import HorovodEngine
        from azureml_elastic.node.diagnostics.checks.accelerator import count_visible_devices

        name = f"{socket.gethostname()}-{os.getpid()}"
        return HorovodEngine(name, workers or count_visible_devices(environment) or 1, program, agent)
    from azureml_elastic.engines.cluster import ClusterEngine
    from azureml_elastic.engines.ray import Ray

    return ClusterEngine(Ray(host, workers or cpus, folder), program)


if __name__ == "__main__":
    sys.exit(main())
