"""Whether a training program uses this library, found by reading its text and that of the local modules it imports."""

from __future__ import annotations

from azureml_elastic.config.command.program import Program, program_files

__all__ = ["opens_session"]


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
