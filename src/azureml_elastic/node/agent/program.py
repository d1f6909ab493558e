"""What is known of the program before it starts: whether it uses this library, and the engine that takes its place."""

from __future__ import annotations

import hmac

from azureml_elastic.config import ElasticDistribution
from azureml_elastic.config.command.program import Program, program_files

__all__ = ["derive_engine_key", "engine_program", "opens_session"]


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


def opens_session(program: Program) -> bool:
    """Return whether the program, or a local module that it imports, mentions this library.

    Args:
        program: the training program.

    Returns:
        True also where the program's own file cannot be found.
    """
    found = False
    for _, text in program_files(program):
        found = True
        if b"azureml_elastic" in text:
            return True
    return not found
