"""``python -m azureml_elastic.node -- python train.py ...``: what each node of an elastic job runs.

Exit codes: 0 the run ended well (also for a node that came too late), 143 this node was preempted and the run goes on
without it, 2 the input is wrong, otherwise the failing worker's.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Callable, Sequence

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import ElasticError, UsageError
from azureml_elastic.forks.client import PreloadServer
from azureml_elastic.log_lines import write_log_lines
from azureml_elastic.node.startup.preload import start_early
from azureml_elastic.node.startup.shared_outputs import SharedOutputs
from azureml_elastic.output_encoding import accept_all_characters
from azureml_elastic.program.command import parse_program

_DOCTOR = "azureml_elastic.node.diagnostics.doctor"


def main(
    argv: Sequence[str] | None = None,
    start_preload: Callable[..., PreloadServer] = PreloadServer,
    *,
    early: bool = True,
) -> int:
    """Run this node and return its exit code.

    Args:
        argv: the arguments without the program's name; ``None`` takes the process's own.
        start_preload: function that starts the preload server, with the arguments of :class:`PreloadServer`.
        early: whether it is started before the agent's own imports.
    """
    accept_all_characters()
    environment = NodeEnvironment.read()
    write_log_lines(environment.log_level)
    logging.getLogger("azure").setLevel(logging.WARNING)
    logging.getLogger("torch").setLevel(logging.WARNING)
    parser = argparse.ArgumentParser(
        prog="python -m azureml_elastic.node",
        description="Run one node of an elastic job. The plan is read from the environment.",
    )
    parser.add_argument("--checkpoint-dir", help="folder or mount for the checkpoints of all runs")
    parser.add_argument(
        "--output", action="append", metavar="NAME=PATH", help="output of this node that all nodes write together"
    )
    parser.add_argument("--placeholders", metavar="NAME", help="name in the arguments' placeholders: %%{NAME:RANK}")
    parser.add_argument("program", nargs="+", metavar="-- python train.py ...", help="the training program")
    arguments = parser.parse_args(argv)
    try:
        program = dataclasses.replace(parse_program(arguments.program), placeholders=arguments.placeholders)
        if program.kind == "module" and program.target == _DOCTOR:
            from azureml_elastic.node.diagnostics.doctor import main as examine

            return examine(program.arguments)  # in the node's place: it finds out why nodes fail
        outputs = SharedOutputs(arguments.output) if arguments.output and arguments.checkpoint_dir else None
        program = outputs.redirected(program) if outputs else program
        preload = start_early(program, environment, start_preload) if early else None
        try:
            # These imports take as long as a third of torch's, which the preload server makes meanwhile.
            from azureml_elastic.node.host.identity import read_identity
            from azureml_elastic.node.startup.entry import run_node

            identity = read_identity(environment, checkpoint_dir=arguments.checkpoint_dir)
            if outputs is None:
                return run_node(identity, program, environment, preload, start_preload)
            outputs.open(arguments.checkpoint_dir, identity.run_id)
            exit_code = run_node(identity, program, environment, preload, start_preload)
            if exit_code == 0:
                outputs.publish(environment)
            return exit_code
        finally:
            if preload is not None:
                preload.close()
            if outputs is not None:
                outputs.close()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except ElasticError as error:
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)


if __name__ == "__main__":
    sys.exit(main())
