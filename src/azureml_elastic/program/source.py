"""The text of a program: its own file, and those of the local modules that it imports. Nothing is executed."""

from __future__ import annotations

import ast
import gc
import sys
import warnings
from collections.abc import Iterable, Iterator
from functools import cached_property
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import NamedTuple

from azureml_elastic.program.command import Program


class Imported(NamedTuple):
    """A name that an import statement has."""

    line: int
    level: int
    """Number of dots in front."""
    dotted: str
    """The name with its module."""
    as_name: str


class Module:
    """A module of a program, parsed once.

    Args:
        shown: path in messages.
    """

    def __init__(self, path: Path, text: bytes, shown: str) -> None:
        self.path = path
        self.text = text
        self.shown = shown
        self.tree = parse_quietly(text) or ast.Module([], [])

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Its nodes, without docstrings, which show commands that the module does not start."""
        nodes = list(ast.walk(self.tree))
        documentation = {id(node.value) for node in nodes if isinstance(node, ast.Expr) and text_of(node.value)}
        return [node for node in nodes if id(node) not in documentation]

    @cached_property
    def imports(self) -> list[Imported]:
        """Its imports, those inside functions too."""
        found = []
        for node in self.nodes:
            if isinstance(node, ast.Import | ast.ImportFrom):
                level, module = (node.level, node.module) if isinstance(node, ast.ImportFrom) else (0, None)
                for name, as_name in ((alias.name, alias.asname or alias.name) for alias in node.names):
                    found.append(Imported(node.lineno, level, f"{module}.{name}" if module else name, as_name))
        return found

    @cached_property
    def names(self) -> dict[str, str]:
        """The full names of what it imports, by the names that it has there."""
        return {each.as_name: each.dotted for each in self.imports if not each.level}

    @property
    def calls(self) -> Iterator[ast.Call]:
        """Its calls of functions."""
        return (node for node in self.nodes if isinstance(node, ast.Call))

    def full_name(self, node: ast.AST) -> str:
        """Return a dotted name with the module that its first part stands for."""
        first, dot, rest = dotted_name(node).partition(".")
        return f"{self.names.get(first, first)}{dot}{rest}"

    def place(self, line: int) -> str:
        """Return where a line is, for messages."""
        return f"{self.shown}:{line}"


def program_modules(program: Program, folder: Path | None = None) -> Iterator[Module]:
    """Yield the modules that a program consists of, its own first; none if that cannot be found.

    Local modules are those below the folder that Python puts first on the path: the script's folder, or the working
    directory for ``python -m``. Those of an installed program are the modules of its own package.

    Args:
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
        if not main.is_file() and folder is not None:
            main = root.joinpath(*parts, "__main__.py")
        elif not main.is_file() and (installed := _installed(parts)) is not None:
            main, root = installed
            within = root / parts[0]
    here = folder or Path.cwd()
    pending, seen = [main], set()
    while pending:
        path = pending.pop()
        if path in seen or not path.is_file():
            continue
        seen.add(path)
        try:
            module = Module(path, path.read_bytes(), str(path.relative_to(here) if path.is_relative_to(here) else path))
        except OSError:
            continue
        yield module
        pending.extend(found for found in _local_imports(module, root) if found.is_relative_to(within))


def opens_session(modules: Iterable[Module]) -> bool:
    """Return whether one of a program's modules mentions this library; true without any."""
    mentions = [b"azureml_elastic" in module.text for module in modules]
    return not mentions or any(mentions)


def dotted_name(node: ast.AST) -> str:
    """Return the name that an expression consists of, such as ``os.environ``; what is no name in it is left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def text_of(node: ast.AST) -> str:
    """Return the text that an expression is; empty for any other."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def parse_quietly(text: bytes) -> ast.Module | None:
    """Return the syntax tree of a module, ``None`` if it has none."""
    # The interpreter keeps one recursion depth for all threads while it builds a tree. A collection in between may run
    # finalizers, thus another thread that parses (a traceback that is logged does), and end in a SystemError
    # (CPython 3.11, https://github.com/python/cpython/issues/106905).
    collecting = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are reported when the program runs
            return ast.parse(text)
    # Null bytes are a ValueError, and expressions that are nested too deeply one of the last two.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    finally:
        if collecting:
            gc.enable()


def _installed(parts: list[str]) -> tuple[Path, Path] | None:
    """Return the file that ``python -m`` runs for a module on the path, and the folder that has its top package."""
    # Package by package, as importlib.util.find_spec() would import the packages around a module.
    folders: Iterable[str] | None = [str(Path.cwd()), *sys.path]
    spec: ModuleSpec | None = None
    for end in range(1, len(parts) + 1):
        spec = None if folders is None else PathFinder.find_spec(".".join(parts[:end]), list(folders))
        if spec is None:
            return None
        folders = spec.submodule_search_locations
    if folders is not None:
        spec = PathFinder.find_spec(".".join([*parts, "__main__"]), list(folders))
    if spec is None or spec.origin is None:
        return None
    main = Path(spec.origin)  # of a package its __main__.py, one folder further down
    return main, main.parents[len(parts) - (folders is None)]


def _local_imports(module: Module, root: Path) -> Iterator[Path]:
    """Yield the files of the local modules that a module imports: those of their packages and their own."""
    for each in module.imports:
        base = module.path.parents[each.level - 1] if each.level else root
        parts = each.dotted.split(".")
        if each.level and len(parts) == 1:
            yield base / "__init__.py"
        for part in parts:
            base /= part
            yield base.with_name(f"{part}.py")
            yield base / "__init__.py"
