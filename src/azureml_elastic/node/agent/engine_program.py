"""The program that a node starts in the place of its worker where a round runs the cluster of an engine."""

from __future__ import annotations

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.config.command.program import Program

__all__ = ["engine_program"]


def engine_program(program: Program, distribution: ElasticDistribution) -> Program:
    """Return the program that runs an engine's cluster and, on the first node, the user's program.

    Args:
        program: the user's program, which is returned as it is where there is no engine.
        distribution: the job's distribution.
    """
    if not distribution.runs_engine:
        return program
    count = distribution.process_count_per_instance
    workers = count if isinstance(count, int) else 1
    arguments = (distribution.framework, "--workers", str(workers), "--", *program.command)
    return Program(None, (), "module", "azureml_elastic.engines", arguments, program.placeholders)
