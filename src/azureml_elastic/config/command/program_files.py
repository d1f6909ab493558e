"""The files of a training program: its own, and those of the local modules that it imports. Nothing is executed."""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from azureml_elastic.config.command.program import Program

__all__ = ["dotted_name", "full_name", "imported_names", "parse_quietly", "program_files"]


def program_files(program: Program, folder: Path | None = None) -> Iterator[tuple[Path, bytes]]:
    """Yield the files that a program consists of, with their text, its own first; none if that cannot be found.

    Imports inside functions count as well. Local modules are those below the folder that Python puts first on the path:
    the script's folder, or the working directory for ``python -m``. Those of an installed program are the modules of
    its own package.

    Args:
        program: the training program.
        folder: working directory of the program, which has no installed programs here; ``None`` for that of this
            process, on whose path installed programs are.
    """
    if program.kind == "script":
        main = (folder or Path()) / program.target
        root = within = main.parent
    else:
        parts = program.target.split(".")
        root = within = folder or Path()
        main = root.joinpath(*parts).with_suffix(".py")
        below = root.joinpath(*parts, "__main__.py")
        if not main.is_file() and folder is not None:
            main = below
        elif not main.is_file() and (installed := _installed(parts)) is not None:
            main, root = installed
            within = root / parts[0]
    if not main.is_file():
        return
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
        yield path, text
        pending.extend(found for found in _local_imports(text, path, root) if found.is_relative_to(within))


def dotted_name(node: ast.AST) -> str:
    """Return the name that an expression consists of, such as ``os.environ``; what is no name in it is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported_names(tree: ast.Module) -> dict[str, str]:
    """Return the full names of what a module imports, by the names that it has there."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update({alias.asname: alias.name for alias in node.names if alias.asname})
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.update({alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names})
    return found


def full_name(node: ast.AST, imports: Mapping[str, str]) -> str:
    """Return a dotted name with the module that its first part stands for."""
    first, dot, rest = dotted_name(node).partition(".")
    return f"{imports.get(first, first)}{dot}{rest}"


def parse_quietly(text: bytes) -> ast.Module | None:
    """Return the syntax tree of a module, ``None`` if it has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are reported when the program runs
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _installed(parts: list[str]) -> tuple[Path, Path] | None:
    """Return the file that ``python -m`` runs for a module on the path, and the folder that has its top package."""
    folders: Iterable[str] | None = [str(Path.cwd()), *sys.path]
    spec: ModuleSpec | None = None
    for end in range(1, len(parts) + 1):
        if folders is None:
            return None
        spec = PathFinder.find_spec(".".join(parts[:end]), list(folders))
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    if folders is not None:
        spec = PathFinder.find_spec(".".join([*parts, "__main__"]), list(folders))
    if spec is None or spec.origin is None:
        return None
    main = Path(spec.origin)
    return main, main.parents[len(parts) - (folders is None)]


def _local_imports(text: bytes, path: Path, root: Path) -> Iterator[Path]:
    """Yield the files of the local modules that a module imports."""
    tree = parse_quietly(text)
    for node in ast.walk(tree) if tree is not None else ():
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
