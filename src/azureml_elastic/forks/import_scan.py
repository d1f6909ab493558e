"""Scan of the imports of a program, from its text and without execution.

Imports at the top level count, also inside ``if``, ``try``, ``with``, loops and class bodies; those in functions do
not. The session of this library, which every worker imports where a function trains, comes last. Modules of the user's
own folder are scanned recursively in the order of execution, so that the installed modules are listed in the order of
their import.

A statement such as ``os.environ["X"] = ...`` or ``sys.path.insert(0, ...)`` may affect later imports. After it only
torch, numpy and the standard library are imported early, and not even these if torch may read the variable
(:attr:`Findings.obstacle`).
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from azureml_elastic.forks.import_variables import READ_BY_TORCH, is_read_late
from azureml_elastic.program.source import dotted_name, parse_quietly, text_of

_UNKNOWN = "?"
"""Placeholder for a variable whose name is not in the text."""

_PATH = ""
"""Stands for the path among changed variables."""

_ENVIRON = frozenset({"os.environ", "environ"})
_CHANGING = {
    **dict.fromkeys(_ENVIRON, frozenset({"clear", "pop", "popitem", "setdefault", "update"})),
    "os": frozenset({"putenv", "unsetenv"}),
    "sys.path": frozenset({"clear", "insert", "pop", "remove", "reverse", "sort"}),
}
"""Functions that may affect later imports, by their owner; entries appended to the path do not."""

_BASICS = frozenset({"torch", "numpy"})
_EARLY = _BASICS | {"pandas", "scipy", "sklearn"}
"""Packages whose import depends on no variable that the agent sets for its workers, and imports no other package that
does."""

_LIBRARY = "azureml_elastic"


class Import(NamedTuple):
    """Import statement, in the form of ``__import__``'s arguments: a module, and names after ``from module import``."""

    module: str
    names: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """Top-level package."""
        return self.module.partition(".")[0]


SESSION = Import(_LIBRARY, ("train",))
"""The import of this library's session."""


@dataclass(frozen=True)
class Findings:
    """Result of the scan.

    Args:
        imports: imports of installed modules, in order and without duplicates.
        obstacle: reason why torch must not be imported before the script runs, or ``None``.
    """

    imports: tuple[Import, ...]
    obstacle: str | None


def early_imports(findings: Findings) -> tuple[Import, ...]:
    """Return the imports that may be made before the workers' environment is known: the first ones of the program.

    The order of imports stays that of the program, which matters to libraries that load others. So nothing is imported
    early where the program begins with a package that is not in ``_EARLY``.
    """
    if findings.obstacle is not None:
        return ()
    known = [found.package in _EARLY or found.package in sys.stdlib_module_names for found in findings.imports]
    return findings.imports[: known.index(False)] if False in known else findings.imports


def find_imports(kind: str, target: str) -> Findings:
    """Return the installed modules that a program imports at its start.

    Modules are located on the current ``sys.path``, which must be that of the program.

    Args:
        target: path of the script or dotted name of the module; without imports if it cannot be read.
    """
    scan = _Scan()
    if kind == "script":
        scan.read(_Module(Path(target), "__main__", "", is_main=True))
    else:
        scan.follow(target, is_main=True)
    if scan.mentions_library and not scan.only_basics:
        scan.imports.setdefault(SESSION)
    return Findings(tuple(scan.imports), scan.obstacle)


class _Module(NamedTuple):
    path: Path
    name: str
    package: str
    is_main: bool


class _Scan:
    def __init__(self) -> None:
        self.imports: dict[Import, None] = {}
        self.obstacle: str | None = None
        self.mentions_library = self.only_basics = False
        self._seen: set[str] = set()
        names = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
        names |= {site.getusersitepackages(), *site.getsitepackages()}
        names |= {entry for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages", "lib-dynload"}}
        folders = {Path(name) for name in names if name}
        self._installed = folders | {folder.resolve() for folder in folders}

    def follow(self, name: str, names: Sequence[str] = (), *, is_main: bool = False) -> bool:
        """Follow the import of a module, or its execution by ``python -m``; return whether it exists."""
        package = name.partition(".")[0]
        spec: ModuleSpec | None = None
        with contextlib.suppress(ImportError, ValueError, AttributeError):
            spec = importlib.util.find_spec(package)
        if spec is None:
            return False
        installed = self._is_installed(package, spec)
        if installed and not is_main:
            if not self.only_basics or package in _BASICS or package in sys.stdlib_module_names:
                self.imports.setdefault(Import(name, tuple(names)))
            return True
        parts = name.split(".")
        # As an import does: each package runs before what is below it.
        for count in range(1, len(parts) + 1):
            spec = spec if count == 1 else _find_below(".".join(parts[:count]), spec)
            if spec is None:
                return False
            if is_main and count == len(parts) and spec.submodule_search_locations is None:
                self._read_spec(spec, is_main=True)
            elif installed:
                self.imports.setdefault(Import(spec.name))
            else:
                self._read_spec(spec)
        below = ["__main__"] if is_main else names
        for each in below:
            self._read_spec(None if each == "*" else _find_below(f"{name}.{each}", spec), is_main=is_main)
        return True

    def _read_spec(self, spec: ModuleSpec | None, *, is_main: bool = False) -> None:
        if spec is not None and spec.origin is not None and spec.has_location and spec.origin.endswith(".py"):
            package = spec.name if spec.submodule_search_locations is not None else spec.name.rpartition(".")[0]
            self.read(_Module(Path(spec.origin), spec.name, package, is_main))

    def read(self, module: _Module) -> None:
        """Scan the text of a module, once."""
        if module.name in self._seen:
            return
        self._seen.add(module.name)
        with contextlib.suppress(OSError):
            text = module.path.read_bytes()
            tree = parse_quietly(text)
            if tree is not None:
                self.mentions_library |= _LIBRARY.encode() in text
                self._scan(tree.body, module)

    def _is_installed(self, package: str, spec: ModuleSpec) -> bool:
        if package == _LIBRARY or package in sys.builtin_module_names:
            return True
        if not spec.has_location and spec.submodule_search_locations is None:
            return True  # frozen or built in
        paths = list(spec.submodule_search_locations or []) or ([spec.origin] if spec.origin is not None else [])
        return all(self._holds_installed(Path(path).parent) for path in paths)

    def _holds_installed(self, folder: Path) -> bool:
        if self._installed.isdisjoint([folder, *folder.parents]):
            if not any(folder.glob("*.dist-info")):  # pip install --target
                return False
            self._installed.add(folder)
        return True

    # --- statements --------------------------------------------------------------------------------------------------

    def _scan(self, body: Iterable[ast.AST], module: _Module) -> bool:
        """Scan statements in the order of execution; return whether all imports can be found."""
        complete = True
        for statement in body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    complete &= self.follow(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                name = "." * statement.level + (statement.module or "")
                with contextlib.suppress(ImportError):  # else it is not found
                    name = importlib.util.resolve_name(name, module.package)
                complete &= self.follow(name, [alias.name for alias in statement.names])
            elif hasattr(statement, "handlers"):  # Try, and TryStar from Python 3.11 on
                complete &= self._try(statement, module)
            elif not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._record_changes(statement, module)
                first = 1 if isinstance(statement, ast.If) and _never_runs(statement.test, module) else 0
                for block in list(_blocks(statement))[first:]:
                    complete &= self._scan(block, module)
        return complete

    def _try(self, statement: Any, module: _Module) -> bool:
        complete = self._scan(statement.body, module)
        # A block that raises ImportError goes on in its handler, in which programs import what they have instead.
        if complete:
            complete = self._scan(statement.orelse, module)
        else:
            for handler in statement.handlers:
                self._scan(handler.body, module)
        return self._scan(statement.finalbody, module) and complete

    def _record_changes(self, statement: ast.AST, module: _Module) -> None:
        """Record changes of the environment and of the path, which may affect later imports."""
        for node in _evaluated(statement):
            names = [name for name in _changed(node) if not is_read_late(name)]
            self.only_basics = self.only_basics or bool(names)
            if self.obstacle is not None or any(found.package == "torch" for found in self.imports):
                continue
            for name in names:
                if name == _UNKNOWN or READ_BY_TORCH.match(name):
                    what = "os.environ" if name == _UNKNOWN else f"os.environ[{name!r}]"
                    line = getattr(node, "lineno", 0)
                    self.obstacle = f"{module.path}:{line} changes {what} before torch is imported"
                    break


def _never_runs(test: ast.expr, module: _Module) -> bool:
    """Return whether a condition is true for type checkers only, or for a module that is run."""
    is_main = isinstance(test, ast.Compare) and dotted_name(test.left) == "__name__"
    return dotted_name(test).rpartition(".")[2] == "TYPE_CHECKING" or (is_main and not module.is_main)


def _blocks(statement: Any) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of ``if``, ``with``, loops, ``match`` and classes."""
    for part in (statement, *getattr(statement, "cases", ())):
        yield getattr(part, "body", [])
        yield getattr(part, "orelse", [])


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all that it evaluates itself, without its blocks and the bodies of functions."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case | ast.Lambda):
            yield from _evaluated(child)


def _changed(node: ast.AST) -> Iterator[str]:
    """Yield the names of the environment variables that a node changes, and :data:`_PATH`."""
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    for target in targets if isinstance(node, ast.Assign | ast.Delete | ast.AugAssign | ast.AnnAssign) else ():
        owner, key = (target.value, text_of(target.slice)) if isinstance(target, ast.Subscript) else (target, "")
        if dotted_name(owner) in _ENVIRON:
            yield key or _UNKNOWN
        elif dotted_name(owner) == "sys.path":
            yield _PATH
    if isinstance(node, ast.Call):
        owner_name, _, function = dotted_name(node.func).rpartition(".")
        if function == "load_dotenv":
            yield _UNKNOWN
        elif function in _CHANGING.get(owner_name, ()):
            first = node.args[0] if node.args else None
            keys = first.keys if isinstance(first, ast.Dict) else [first] if first or not node.keywords else []
            names = [key and text_of(key) for key in keys] + [keyword.arg for keyword in node.keywords]
            yield from (_PATH if owner_name == "sys.path" else name or _UNKNOWN for name in names)


def _find_below(name: str, parent: ModuleSpec | None) -> ModuleSpec | None:
    """Find a submodule without importing its parent."""
    paths = None if parent is None else parent.submodule_search_locations
    return None if paths is None else PathFinder.find_spec(name, list(paths))
