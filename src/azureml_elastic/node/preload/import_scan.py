"""Scan of the imports of a program, from its text and without execution.

Imports at the top level count, also inside ``if``, ``try``, ``with``, loops and class bodies; those in functions do
not. Modules of the user's own folder are scanned recursively in the order of execution, so that the installed modules
are listed in the order of their import.

A script may prepare an import, as by ``os.environ["X"] = ...`` or ``sys.path.insert(0, ...)``. After such a statement
only torch, numpy and the standard library are imported early; if these read the variable, not even they may be
(:attr:`Findings.obstacle`).
"""

from __future__ import annotations

import ast
import importlib.util
import site
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from azureml_elastic.node.preload.environment_variables import is_read_late
from azureml_elastic.node.preload.statements import (
    UNKNOWN,
    blocks,
    changes_path,
    executed,
    is_main_check,
    is_type_checking,
    own_expressions,
    variables_set,
)

__all__ = ["Findings", "Import", "find_imports"]

_BASICS = frozenset({"torch", "numpy"})
_VARIABLES_OF_BASICS = (
    "ATEN_",
    "BLIS_",
    "CUDA_",
    "DNNL_",
    "GOMP_",
    "GOTO_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "NPY_",
    "NUMPY",
    "OMP_",
    "ONEDNN_",
    "OPENBLAS_",
    "PYTHON",
    "PYTORCH",
    "TORCH",
    "TRITON",
)
_ALWAYS_INSTALLED = "azureml_elastic"


@dataclass(frozen=True)
class Import:
    """Import statement, in the form of ``__import__``'s arguments.

    Args:
        module: absolute module name.
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


def find_imports(kind: str, target: str) -> Findings:
    """Return the installed modules that a program imports at its start.

    Modules are located on the current ``sys.path``, which must be that of the program.

    Args:
        kind: ``"script"`` or ``"module"``.
        target: path of the script or dotted name of the module; without imports if it cannot be read.
    """
    walk = _Walk()
    if kind == "script":
        walk.read(Path(target), "__main__", is_package=False, is_main=True)
    else:
        walk.enter(target, is_main=True)
    return Findings(tuple(walk.imports), walk.obstacle)


class _Walk:
    def __init__(self) -> None:
        self.imports: dict[Import, None] = {}
        self.obstacle: str | None = None
        self._only_basics = False
        self._seen: set[str] = set()
        self._installed = _installed_folders()

    # --- modules -----------------------------------------------------------------------------------------------------

    def enter(self, name: str, names: Sequence[str] = (), *, is_main: bool = False) -> bool:
        """Follow the import of a module; return whether it exists."""
        package = name.partition(".")[0]
        spec = _find_top(package)
        if spec is None:
            return False
        if self._is_installed(package, spec):
            if is_main:
                self._enter_installed_main(name, spec)
            elif not self._only_basics or package in _BASICS or package in sys.stdlib_module_names:
                self.imports.setdefault(Import(name, tuple(names)))
            return True
        return self._enter_local(name, spec, names, is_main=is_main)

    def _enter_local(self, name: str, spec: ModuleSpec, names: Sequence[str], *, is_main: bool) -> bool:
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            if count > 1:
                deeper = _find_below(".".join(parts[:count]), spec)
                if deeper is None:
                    return False
                spec = deeper
            if not (is_main and count == len(parts)):
                self._read_spec(spec)
        if is_main:
            self._read_main(spec)
            return True
        for below in names:
            found = None if below == "*" else _find_below(f"{name}.{below}", spec)
            if found is not None:
                self._read_spec(found)
        return True

    def _enter_installed_main(self, name: str, spec: ModuleSpec) -> None:
        parts = name.split(".")
        for count in range(2, len(parts) + 1):
            self.imports.setdefault(Import(".".join(parts[: count - 1])))
            deeper = _find_below(".".join(parts[:count]), spec)
            if deeper is None:
                return
            spec = deeper
        self._read_main(spec)

    def _read_main(self, spec: ModuleSpec) -> None:
        """Scan what ``python -m`` runs: the module, or the ``__main__`` of a package after the package."""
        if spec.submodule_search_locations is not None:
            if not self._is_installed(spec.name.partition(".")[0], spec):
                self._read_spec(spec)
            else:
                self.imports.setdefault(Import(spec.name))
            below = _find_below(f"{spec.name}.__main__", spec)
            if below is None:
                return
            spec = below
        self._read_spec(spec, is_main=True)

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
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # shown when the script itself is compiled
                tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return
        package = name if is_package else name.rpartition(".")[0]
        self._run(tree.body, _Module(path, package, is_main))

    def _is_installed(self, package: str, spec: ModuleSpec) -> bool:
        if package == _ALWAYS_INSTALLED or package in sys.builtin_module_names:
            return True
        if not spec.has_location and spec.submodule_search_locations is None:
            return True  # frozen or built in
        places = [Path(place) for place in spec.submodule_search_locations or []]
        if not places and spec.origin is not None:
            places = [Path(spec.origin)]
        return all(self._holds_installed(place.parent) for place in places)

    def _holds_installed(self, folder: Path) -> bool:
        if any(folder == known or known in folder.parents for known in self._installed):
            return True
        found = any(folder.glob("*.dist-info"))  # pip install --target
        if found:
            self._installed.add(folder)
        return found

    # --- statements --------------------------------------------------------------------------------------------------

    def _run(self, body: Iterable[ast.stmt], place: _Module) -> bool:
        """Scan statements in the order of execution; return whether all imports can be found."""
        complete = True
        for statement in body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    complete &= self.enter(alias.name)
            elif isinstance(statement, ast.ImportFrom):
                complete &= self._import_from(statement, place)
            elif isinstance(statement, ast.If):
                complete &= self._if(statement, place)
            elif isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            elif hasattr(statement, "handlers"):  # Try, and TryStar from Python 3.11 on
                complete &= self._try(statement, place)
            else:
                self._heed(own_expressions(statement), place)
                for block in blocks(statement):
                    complete &= self._run(block, place)
        return complete

    def _import_from(self, statement: ast.ImportFrom, place: _Module) -> bool:
        name = statement.module or ""
        if statement.level:
            try:
                name = importlib.util.resolve_name("." * statement.level + name, place.package)
            except ImportError:
                return False
        return self.enter(name, [alias.name for alias in statement.names])

    def _if(self, statement: ast.If, place: _Module) -> bool:
        self._heed([statement.test], place)
        complete = True
        if not (is_type_checking(statement.test) or (is_main_check(statement.test) and not place.is_main)):
            complete = self._run(statement.body, place)
        return self._run(statement.orelse, place) and complete

    def _try(self, statement: Any, place: _Module) -> bool:
        complete = self._run(statement.body, place)
        if complete:
            complete = self._run(statement.orelse, place)
        else:
            for handler in statement.handlers:
                self._run(handler.body, place)
        return self._run(statement.finalbody, place) and complete

    def _heed(self, expressions: Iterable[ast.AST], place: _Module) -> None:
        """Record statements that prepare later imports."""
        for node in executed(expressions):
            serious = [name for name in variables_set(node) if not is_read_late(name)]
            if serious or changes_path(node):
                self._only_basics = True
            for name in serious:
                if name != UNKNOWN and not name.startswith(_VARIABLES_OF_BASICS):
                    continue
                if self.obstacle is None and not any(found.package == "torch" for found in self.imports):
                    what = "os.environ" if name == UNKNOWN else f"os.environ[{name!r}]"
                    line = getattr(node, "lineno", 0)
                    self.obstacle = f"{place.path}:{line} changes {what} before torch is imported"


@dataclass(frozen=True)
class _Module:
    path: Path
    package: str
    is_main: bool


def _find_top(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _find_below(name: str, parent: ModuleSpec) -> ModuleSpec | None:
    """Find a submodule without importing its parent."""
    places = parent.submodule_search_locations
    return None if places is None else PathFinder.find_spec(name, list(places))


def _installed_folders() -> set[Path]:
    names = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    names |= {site.getusersitepackages(), *site.getsitepackages()}
    names |= {entry for entry in sys.path if Path(entry).name in {"site-packages", "dist-packages", "lib-dynload"}}
    return {Path(name) for name in names if name} | {Path(name).resolve() for name in names if name}
