"""The command line of the preload server, and the plain command of the program in it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from azureml_elastic.config.command.program import Program

__all__ = ["OUTERMOST", "outermost", "plain_command", "replace_excluded", "server_command"]


def outermost(package: str) -> str:
    """Return the code that runs a package's module ``server`` with ``-c``.

    Its ``serve`` returns only in children, with a function that runs the script, so this outermost frame is the only
    one below the script's. Its names are removed from ``__main__`` first, and the working directory from the path
    before any import.
    """
    return f"""\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
from {package} import server as serving
try:
    serving.serve()()
except SystemExit:
    raise
except BaseException:
    __import__("sys").modules["azureml_elastic.node.preload.script_runner"].on_uncaught()
    raise
else:
    __import__("sys").modules["azureml_elastic.node.preload.script_runner"].on_end()
"""


OUTERMOST = outermost("azureml_elastic.node.preload")
"""Code that the preload server runs."""

_WAIT = "null"


def server_command(program: Program, descriptor: int) -> list[str]:
    """Return the command that starts the preload server of a program.

    Args:
        program: program of the workers.
        descriptor: descriptor of the server's end of the connection to the agent.
    """
    words = [*program.interpreter_command, "-c", OUTERMOST, str(descriptor), _WAIT]
    return [*words, program.kind, program.target, *program.arguments]


def replace_excluded(words: Sequence[str], excluded: Mapping[str, str]) -> list[str]:
    """Return the command of a preload server that imports less, and has the workers' environment already."""
    changed = list(words)
    changed[changed.index(OUTERMOST) + 2] = json.dumps(dict(excluded))
    return changed


def plain_command(words: Sequence[str]) -> list[str]:
    """Return the command of a plain start of the program, from the command of its preload server."""
    position = list(words).index(OUTERMOST)
    module = ["-m"] if words[position + 3] == "module" else []
    return [*words[: position - 1], *module, *words[position + 4 :]]
