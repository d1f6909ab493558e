"""The command line of a fork server."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from azureml_elastic.program.command import Program

INTERPRETER = (sys.executable, "-u", "-c")
"""Beginning of a server's command, unless its program has an interpreter or options of its own."""

OUTERMOST = """\
import sys
if sys.path[:1] == [""]:
    del sys.path[0]
from azureml_elastic.forks import server as serving
try:
    serving.serve()()
except SystemExit:
    raise
except BaseException:
    __import__("sys").modules["azureml_elastic.forks.script_runner"].on_uncaught()
    raise
else:
    __import__("sys").modules["azureml_elastic.forks.script_runner"].on_end()
"""
"""Code that a server runs. ``serve`` returns only in forks, with a function that runs the script, so this outermost
frame is the only one below the script's. Its names are removed from ``__main__`` first, and the working directory from
the path before any import."""


@dataclass(frozen=True)
class Imports:
    """What a server imports.

    Args:
        program: program whose imports are made, and which the server's workers run; ``None`` for no program.
        modules: further modules, which are imported after those of the program.
        path: folders in which the further modules are searched, too.
        at_once: whether all is imported before the first fork, also what torch imports in its first steps, so that
            forks become nodes with preload servers of their own.
    """

    program: Program | None = None
    modules: tuple[str, ...] = ()
    path: tuple[str, ...] = ()
    at_once: bool = False

    @classmethod
    def from_json(cls, text: str) -> Imports:
        """Read what :func:`server_command` has written."""
        fields = json.loads(text)
        program = fields.pop("program")
        if program is not None:
            program = Program(**{name: _tuple(value) for name, value in program.items()})
        return cls(program, **{name: _tuple(value) for name, value in fields.items()})


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def server_command(imports: Imports, descriptor: int, *, begins: bool = True) -> list[str]:
    """Return the command that starts a server.

    Args:
        begins: whether the environment is that of the workers; else it is sent later.
    """
    interpreter = INTERPRETER if imports.program is None else (*imports.program.interpreter_command, "-c")
    excluded = "{}" if begins else "null"  # packages that are left to the workers, with the reasons
    return [*interpreter, OUTERMOST, str(descriptor), json.dumps(asdict(imports)), excluded]
