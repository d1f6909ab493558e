"""Check that the environment is read and changed in ``azureml_elastic.environment`` alone.

``python tools/environment.py`` prints ``file:line: use`` for each other use in ``src``, and for each exception that is
none any more, and exits with 1 if there is one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "src/azureml_elastic"
HOME = f"{PACKAGE}/environment/"
NAMES = frozenset({"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"})

EXCEPTIONS: Mapping[str, str] = {
    f"{PACKAGE}/local/forked_node.py": "gives a fork the environment of its node",
    f"{PACKAGE}/forks/import_loader.py": "modules refer to the object, whose reads it notes",
    f"{PACKAGE}/forks/plain_start/sitecustomize.py": "its interpreter may have no package",
    f"{PACKAGE}/forks/script_runner.py": "gives a fork the environment of its worker",
    f"{PACKAGE}/forks/server.py": "compares it before and after the imports of a script",
    f"{PACKAGE}/forks/stack_imports.py": "reads it when a script is about to import a stack",
    f"{PACKAGE}/submit/runtime/start.py": "makes the package importable",
    f"{PACKAGE}/testing/forks/wrapper.py": "imports nothing, each command of a job would wait for it",
}
"""Files that use the environment of the process itself, and why they must."""


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the expression of each use of the environment in a module."""
    tree = ast.parse(source)
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name in ("os", "posix")
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in ("os", "posix"):
            yield from (
                (node.lineno, f"from {node.module} import {each.name}") for each in node.names if each.name in NAMES
            )
        elif (
            isinstance(node, ast.Attribute)
            and node.attr in NAMES
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
        ):
            yield node.lineno, f"{node.value.id}.{node.attr}"


def findings(files: Mapping[str, str], exceptions: Mapping[str, str] = EXCEPTIONS) -> list[str]:
    """Return what is wrong in files, given as sources by path."""
    found = []
    for path, source in sorted(files.items()):
        used = [] if path.startswith(HOME) else list(uses(source))
        if path not in exceptions:
            found += [f"{path}:{line}: {use} outside azureml_elastic.environment" for line, use in used]
        elif not used:
            found.append(f"{path}:1: no exception any more, it does not use the environment")
    found += [f"{path}:1: an exception that does not exist" for path in sorted(exceptions.keys() - files.keys())]
    return found


def main() -> int:
    """Print what is wrong in the project; return the exit code."""
    paths = sorted((ROOT / PACKAGE).rglob("*.py"))
    found = findings({path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths})
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
