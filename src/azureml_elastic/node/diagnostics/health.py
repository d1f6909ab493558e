"""``python -m azureml_elastic.node.diagnostics.health``: check this machine as a node would, and print what was found.

Exit codes: 0 a node may join from here, 1 it may not, 2 the plan in the environment cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from azureml_elastic.config import HealthPolicy
from azureml_elastic.config import environment as variables
from azureml_elastic.errors import ElasticError
from azureml_elastic.node.diagnostics.findings import CheckRunner
from azureml_elastic.node.diagnostics.node_checks import check_folders, node_checks
from azureml_elastic.node.host.identity import NodeIdentity, read_identity
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.server_time import ServerClock

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine and return the exit code.

    Args:
        argv: the arguments without the program's name; ``None`` takes the process's own.
    """
    parser = argparse.ArgumentParser(
        prog="python -m azureml_elastic.node.diagnostics.health",
        description="Check this machine as a node does before it joins. Where the environment holds a plan, its limits "
        "count, and the table's clock and the running round are looked at.",
    )
    parser.add_argument("--folder", action="append", type=Path, help="another folder to write to; may be repeated")
    parser.add_argument("--checkpoint-dir", help="folder or mount for the checkpoints of all runs")
    arguments = parser.parse_args(argv)
    try:
        identity = None
        if os.environ.get(variables.PLAN):
            identity = read_identity(os.environ, checkpoint_dir=arguments.checkpoint_dir)
        return _check(identity, arguments.folder or [], arguments.checkpoint_dir)
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(identity: NodeIdentity | None, folders: list[Path], checkpoints: str | None) -> int:
    policy = identity.plan.distribution.health if identity else HealthPolicy()
    if identity is None:
        wanted = check_folders(Path.cwd(), checkpoints)
    else:
        wanted = check_folders(identity.folder, identity.plan.checkpoint.path)
    wanted |= {str(folder): folder for folder in folders}
    node = f"{identity.node if identity else 'check'}-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        table = clock = None
        if identity is not None:
            table = open_table(identity.plan.distribution.rendezvous, identity.run_id, os.environ)
            stack.callback(table.close)
            clock = ServerClock(table, node)
        gpus = len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
        probes = node_checks(policy, node=node, folders=wanted, gpus=gpus, table=table, clock=clock)
        report = CheckRunner(probes).wait()
        if clock is not None:
            clock.forget()
    print(report.table())
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
