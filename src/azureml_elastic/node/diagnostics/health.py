"""``python -m azureml_elastic.node.diagnostics.health``: run the checks of a joining node and print the findings.

Exit codes: 0 a node may join, 1 it may not, 2 the plan in the environment is not usable.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from azureml_elastic.config import HealthPolicy
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import ElasticError
from azureml_elastic.node.diagnostics.checks.accelerator import count_devices
from azureml_elastic.node.diagnostics.findings import CheckRunner
from azureml_elastic.node.diagnostics.node_checks import check_folders, node_checks
from azureml_elastic.node.host.identity import read_identity
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.server_time import ServerClock


def main(argv: Sequence[str] | None = None) -> int:
    """Check this machine and return the exit code; ``None`` means the arguments of the process."""
    parser = argparse.ArgumentParser(
        prog="python -m azureml_elastic.node.diagnostics.health",
        description="Check this machine as a node does before it joins. With a plan in the environment, the plan's "
        "limits apply, and the table's clock and the running round are checked, too.",
    )
    parser.add_argument("--folder", action="append", type=Path, default=[], help="another folder; may be repeated")
    parser.add_argument("--checkpoint-dir", help="folder or mount for the checkpoints of all runs")
    arguments = parser.parse_args(argv)
    try:
        return _check(arguments.folder, arguments.checkpoint_dir)
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _check(more_folders: list[Path], checkpoint_dir: str | None) -> int:
    policy, folders, node = HealthPolicy(), check_folders(Path.cwd(), checkpoint_dir), f"check-{os.getpid()}"
    table = clock = None
    with contextlib.ExitStack() as stack:
        environment = NodeEnvironment.read()
        if environment.plan is not None:
            identity = read_identity(environment, checkpoint_dir=checkpoint_dir)
            policy, node = identity.plan.health, f"{identity.node}-{os.getpid()}"
            folders = check_folders(identity.folder, identity.plan.checkpoint.path)
            table = open_table(identity.plan.rendezvous, identity.run_id, environment)
            stack.callback(table.close)
            clock = ServerClock(table, node)
            stack.callback(clock.forget)
        folders |= {str(folder): folder for folder in more_folders}
        checks = node_checks(policy, node=node, folders=folders, gpus=count_devices(), table=table, clock=clock)
        report = CheckRunner(checks).wait()
    print(f"{report.text()}\n{report.status} after {report.seconds:.2f} s")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
