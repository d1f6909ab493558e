"""Whether a training program uses this library, found by reading its text and that of the local modules it imports."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator
from pathlib import Path

from azureml_elastic.config.command.program import Program

__all__ = ["opens_session"]


def opens_session(program: Program) -> bool:
    """Return whether the program, or a local module that it imports, mentions this library.

    Nothing is executed. Imports inside functions count as well. Local modules are those below the folder that Python
    puts first on the path: the script's folder, or the working directory for ``python -m``.

    Args:
        program: the training program.

    Returns:
        True also where the program's own file cannot be found, since it may be an installed module.
    """
    if program.kind == "script":
        main = Path(program.target)
        root = main.parent
    else:
        main = Path(*program.target.split(".")).with_suffix(".py")
        root = Path()
    if not main.is_file():
        return True
    seen: set[Path] = set()
    pending = [main]
    while pending:
        path = pending.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            text = path.read_bytes()
        except OSError:
            continue
        if b"azureml_elastic" in text:
            return True
        pending.extend(_local_imports(text, path, root))
    return False


def _local_imports(text: bytes, path: Path, root: Path) -> Iterator[Path]:
    """Yield the files of the local modules that a module imports."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are reported when the program runs
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(root, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = root if node.level == 0 else path.parents[node.level - 1]
            parts = node.module.split(".") if node.module else []
            for alias in node.names:
                yield from _files(base, [*parts, alias.name])
            if not parts:
                yield base / "__init__.py"


def _files(base: Path, parts: list[str]) -> Iterator[Path]:
    """Yield the existing files of a dotted name below a folder: its packages' and the module's own."""
    for part in parts:
        base /= part
        candidates = (base.with_name(f"{part}.py"), base / "__init__.py")
        yield from (path for path in candidates if path.is_file())
