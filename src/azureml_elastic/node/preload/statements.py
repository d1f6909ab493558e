"""Static analysis of single statements."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from azureml_elastic.config.command.program import dotted_name

__all__ = [
    "UNKNOWN",
    "blocks",
    "changes_path",
    "executed",
    "is_main_check",
    "is_type_checking",
    "own_expressions",
    "variables_set",
]

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
            names.append(_text(target.slice))
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
            names += [UNKNOWN if key is None else _text(key) for key in keys]
        return names
    return [_text(call.args[0])] if call.args else [UNKNOWN]


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else UNKNOWN


def changes_path(node: ast.AST) -> bool:
    """Return whether a node may redirect later imports; entries appended to the path do not."""
    for target in _targets(node):
        if dotted_name(target.value if isinstance(target, ast.Subscript) else target) == "sys.path":
            return True
    if isinstance(node, ast.Call):
        owner, _, function = dotted_name(node.func).rpartition(".")
        return owner == "sys.path" and function in _PATH_CALLS
    return False
