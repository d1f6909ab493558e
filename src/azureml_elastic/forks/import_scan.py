"""Scan of the imports of a program, from its text and without execution.

Imports at the top level count, also inside ``if``, ``try``, ``with``, loops and class bodies; those in functions do
not, except for those of this library, which every worker makes where a function trains: they come last. Modules of the
user's own folder are scanned recursively in the order of execution, so that the installed modules are listed in the
order of their import.

A statement such as ``os.environ["X"] = ...`` or ``sys.path.insert(0, ...)`` may affect later imports. After it only
torch, numpy and the standard library are imported early, and not even these if torch may read the variable
(:attr:`Findings.obstacle`).
"""

from __future__ import annotations

import ast
import importlib.util
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from azureml_elastic.forks.import_variables import READ_BY_TORCH, is_read_late
from azureml_elastic.program.source import dotted_name, parse_quietly, text_of

UNKNOWN = "?"
"""Placeholder for a variable whose name is not in the text."""

_ENVIRON = frozenset({"os.environ", "environ"})
_ENVIRON_CALLS = frozenset({"clear", "pop", "popitem", "setdefault", "update"})
_PATH_CALLS = frozenset({"clear", "insert", "pop", "remove", "reverse", "sort"})


def own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions that a statement evaluates itself, without its blocks."""
    if not list(blocks(statement)):
        yield statement
        return
    for value in ast.iter_child_nodes(statement):
        if not isinstance(value, (ast.stmt, ast.ExceptHandler)) and type(value).__name__ != "match_case":
            yield value


def blocks(statement: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the blocks of ``with``, loops, ``match`` and classes."""
    for name in ("body", "orelse"):
        block = getattr(statement, name, None)
        if isinstance(block, list):
            yield block
    for case in getattr(statement, "cases", []):
        yield case.body


def executed(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield all nodes except the bodies of functions."""
    for node in nodes:
        if isinstance(node, (ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        yield node
        yield from executed(ast.iter_child_nodes(node))


def is_type_checking(test: ast.expr) -> bool:
    """Return whether a condition is true for type checkers only."""
    return dotted_name(test).rpartition(".")[2] == "TYPE_CHECKING"


def is_main_check(test: ast.expr) -> bool:
    """Return whether a condition compares ``__name__``."""
    return isinstance(test, ast.Compare) and dotted_name(test.left) == "__name__"


def _targets(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.Assign, ast.Delete)):
        return node.targets
    return [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign)) else []


def variables_set(node: ast.AST) -> list[str]:
    """Return the names of the environment variables that a node changes."""
    names: list[str] = []
    for target in _targets(node):
        if isinstance(target, ast.Subscript) and dotted_name(target.value) in _ENVIRON:
            names.append(text_of(target.slice) or UNKNOWN)
        elif dotted_name(target) in _ENVIRON:
            names.append(UNKNOWN)
    if isinstance(node, ast.Call):
        owner, _, function = dotted_name(node.func).rpartition(".")
        if (owner in _ENVIRON and function in _ENVIRON_CALLS) or (owner == "os" and function in {"putenv", "unsetenv"}):
            names += _names_passed(node, function)
        elif function == "load_dotenv":
            names.append(UNKNOWN)
    return names


def _names_passed(call: ast.Call, function: str) -> list[str]:
    if function == "update":
        names = [keyword.arg or UNKNOWN for keyword in call.keywords]
        for argument in call.args:
            keys = argument.keys if isinstance(argument, ast.Dict) else [None]
            names += [UNKNOWN if key is None else text_of(key) or UNKNOWN for key in keys]
        return names
    return [text_of(call.args[0]) or UNKNOWN] if call.args else [UNKNOWN]


def changes_path(node: ast.AST) -> bool:
    """Return whether a node may redirect later imports; entries appended to the path do not."""
    for target in _targets(node):
        if dotted_name(target.value if isinstance(target, ast.Subscript) else target) == "sys.path":
            return True
    if isinstance(node, ast.Call):
        owner, _, function = dotted_name(node.func).rpartition(".")
        return owner == "sys.path" and function in _PATH_CALLS
    return False


_BASICS = frozenset({"torch", "numpy"})
_EARLY = _BASICS | {"pandas", "scipy", "sklearn"}
"""Packages whose import depends on no variable that the agent sets for its workers, and imports no other package that
does."""

_ALWAYS_INSTALLED = "azureml_elastic"


@dataclass(frozen=True)
class Import:
    """Import statement, in the form of ``__import__``'s arguments.

    Args:
        names: names after ``from module import``.
    """

    module: str
    names: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """Top-level package."""
        return self.module.partition(".")[0]


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
        kind: ``"script"`` or ``"module"``.
        target: path of the script or dotted name of the module; without imports if it cannot be read.
    """
    scan = _Scan()
    if kind == "script":
        scan.read(Path(target), "__main__", is_package=False, is_main=True)
    else:
        scan.follow(target, is_main=True)
    return Findings((*scan.imports, *scan.own_later()), scan.obstacle)


@dataclass(frozen=True)
class _Module:
    path: Path
    package: str
    is_main: bool


class _Scan:
    def __init__(self) -> None:
        self.imports: dict[Import, None] = {}
        self._in_functions: dict[Import, None] = {}
        self.obstacle: str | None = None
        self._only_basics = False
        self._seen: set[str] = set()
        self._installed = _installed_folders()

    # --- modules -----------------------------------------------------------------------------------------------------

    def follow(self, name: str, names: Sequence[str] = (), *, is_main: bool = False) -> bool:
        """Follow the import of a module, or its execution by ``python -m``; return whether it exists."""
        package = name.partition(".")[0]
        spec = _find_top(package)
        if spec is None:
            return False
        installed = self._is_installed(package, spec)
        if installed and not is_main:
            if not self._only_basics or package in _BASICS or package in sys.stdlib_module_names:
                self.imports.setdefault(Import(name, tuple(names)))
            return True
        parts = name.split(".")
        # As an import does: each package runs before what is below it.
        for count in range(1, len(parts) + 1):
            if count > 1:
                spec = _find_below(".".join(parts[:count]), spec)
                if spec is None:
                    return False
            if count < len(parts) or not is_main or spec.submodule_search_locations is not None:
                self._enter(spec, installed=installed)
        if is_main:
            if spec.submodule_search_locations is not None:
                spec = _find_below(f"{name}.__main__", spec)
            if spec is not None:
                self._read_spec(spec, is_main=True)
            return True
        for below in names:
            found = None if below == "*" else _find_below(f"{name}.{below}", spec)
            if found is not None:
                self._read_spec(found)
        return True

    def own_later(self) -> list[Import]:
        """Return the imports of this library that only functions make."""
        return [] if self._only_basics else [found for found in self._in_functions if found not in self.imports]

    def _enter(self, spec: ModuleSpec, *, installed: bool) -> None:
        if installed:
            self.imports.setdefault(Import(spec.name))
        else:
            self._read_spec(spec)

    def _read_spec(self, spec: ModuleSpec, *, is_main: bool = False) -> None:
        if spec.origin is not None and spec.has_location and spec.origin.endswith(".py"):
            is_package = spec.submodule_search_locations is not None
            self.read(Path(spec.origin), spec.name, is_package=is_package, is_main=is_main)

    def read(self, path: Path, name: str, *, is_package: bool, is_main: bool) -> None:
        """Scan the text of a module, once."""
        if name in self._seen:
            return
        self._seen.add(name)
        try:
            tree = parse_quietly(path.read_bytes())
        except OSError:
            return
        if tree is None:
            return
        package = name if is_package else name.rpartition(".")[0]
        self._scan(tree.body, _Module(path, package, is_main))

    def _is_installed(self, package: str, spec: ModuleSpec) -> bool:
        if package == _ALWAYS_INSTALLED or package in sys.builtin_module_names:
            return True
        if not spec.has_location and spec.submodule_search_locations is None:
            return True  # frozen or built in
        paths = list(spec.submodule_search_locations or []) or ([spec.origin] if spec.origin is not None else [])
        return all(self._holds_installed(Path(path).parent) for path in paths)

    def _holds_installed(self, folder: Path) -> bool:
        if any(folder == known or known in folder.parents for known in self._installed):
            return True
        found = any(folder.glob("*.dist-info"))  # pip install --target
        if found:
            self._installed.add(folder)
        return found

    # --- statements --------------------------------------------------------------------------------------------------

    def _scan(self, body: Iterable[ast.stmt], module: _Module) -> bool:
        """Scan statements in the order of execution; return whether all imports can be found."""
        complete = True
        for statement in body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    complete &= self.follow(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                complete &= self._import_from(statement, module)
            elif isinstance(statement, ast.If):
                complete &= self._if(statement, module)
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                self._in_functions |= dict.fromkeys(_own_imports(statement))
            elif hasattr(statement, "handlers"):  # Try, and TryStar from Python 3.11 on
                complete &= self._try(statement, module)
            else:
                self._record_changes(own_expressions(statement), module)
                for block in blocks(statement):
                    complete &= self._scan(block, module)
        return complete

    def _import_from(self, statement: ast.ImportFrom, module: _Module) -> bool:
        name = statement.module or ""
        if statement.level:
            try:
                name = importlib.util.resolve_name("." * statement.level + name, module.package)
            except ImportError:
                return False
        return self.follow(name, [alias.name for alias in statement.names])

    def _if(self, statement: ast.If, module: _Module) -> bool:
        self._record_changes([statement.test], module)
        complete = True
        if not (is_type_checking(statement.test) or (is_main_check(statement.test) and not module.is_main)):
            complete = self._scan(statement.body, module)
        return self._scan(statement.orelse, module) and complete

    def _try(self, statement: Any, module: _Module) -> bool:
        complete = self._scan(statement.body, module)
        # A block that raises ImportError goes on in its handler, in which programs import what they have instead.
        if complete:
            complete = self._scan(statement.orelse, module)
        else:
            for handler in statement.handlers:
                self._scan(handler.body, module)
        return self._scan(statement.finalbody, module) and complete

    def _record_changes(self, expressions: Iterable[ast.AST], module: _Module) -> None:
        """Record changes of the environment and of the path, which may affect later imports."""
        for node in executed(expressions):
            variables = [name for name in variables_set(node) if not is_read_late(name)]
            if variables or changes_path(node):
                self._only_basics = True
            if self.obstacle is not None or any(found.package == "torch" for found in self.imports):
                continue
            for name in variables:
                if name == UNKNOWN or READ_BY_TORCH.match(name):
                    what = "os.environ" if name == UNKNOWN else f"os.environ[{name!r}]"
                    line = getattr(node, "lineno", 0)
                    self.obstacle = f"{module.path}:{line} changes {what} before torch is imported"
                    break


def _own_imports(function: ast.AST) -> Iterator[Import]:
    """Yield the imports of this library in a function, which depend on nothing that the program does before."""
    for node in ast.walk(function):
        if isinstance(node, ast.Import):
            found = [Import(alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None and not node.level:
            found = [Import(node.module, tuple(alias.name for alias in node.names))]
        else:
            continue
        yield from (each for each in found if each.package == _ALWAYS_INSTALLED)


def _find_top(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _find_below(name: str, parent: ModuleSpec) -> ModuleSpec | None:
    """Find a submodule without importing its parent."""
    paths = parent.submodule_search_locations
    return None if paths is None else PathFinder.find_spec(name, list(paths))


def _installed_folders() -> set[Path]:
    names = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    names |= {site.getusersitepackages(), *site.getsitepackages()}
    names |= {entry for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages", "lib-dynload"}}
    return {Path(name) for name in names if name} | {Path(name).resolve() for name in names if name}
