"""The program that a node starts in the place of its worker where a round runs an engine, and the engine's key."""

from __future__ import annotations

import hmac

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.config.command.program import Program

__all__ = ["derive_engine_key", "engine_program"]


def engine_program(program: Program, distribution: ElasticDistribution) -> Program:
    """Return the program that runs an engine on this node, and with it the user's program.

    Args:
        program: the user's program, which is returned as it is where there is no engine.
        distribution: the job's distribution.
    """
    if not distribution.runs_engine:
        return program
    count = distribution.process_count_per_instance
    arguments = (distribution.framework, "--workers", str(count), "--", *program.command)
    return Program(None, (), "module", "azureml_elastic.engines", arguments, program.placeholders)


def derive_engine_key(run_key: bytes | None) -> bytes:
    """Return the key for an engine's own connections, which does not reveal the run's key; empty without one."""
    return b"" if run_key is None else hmac.digest(run_key, b"azureml-elastic engine", "sha256")
