"""Ranks and addresses that a training program fixes itself, found in its text.

The agent starts one process for each rank and sets the variables of torchrun. A program that sets them to values of its
own, or starts its ranks itself, connects to an address at which nobody listens, and waits for minutes.

Only what the program does in any case is found: nothing under an ``if`` (but ``__name__ == "__main__"``), after one
that leaves the function, in an exception handler, in a function that nothing of this kind refers to, and no value that
comes from anywhere else, such as an environment variable, an argument or a parameter. What remains is said when it
happens, see :mod:`azureml_elastic.distributed.launch_check`.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from azureml_elastic.config.command.program import dotted_name, full_name, imported_names, parse_quietly

__all__ = ["FixedRank", "describe_fixed_ranks", "find_fixed_ranks"]

_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"})
_GROUPS = frozenset({"init_distributed", "init_process_group"})
"""Functions of torch and DeepSpeed that open the process group."""

_SPAWNS = frozenset(f"torch.multiprocessing.{name}" for name in ("spawn", "spawn.spawn", "start_processes"))
_ADDRESSES = ("tcp://", "file://")
_FIXED_CALLS = frozenset({"int", "str", "os.cpu_count", "socket.gethostname", "torch.cuda.device_count"})
"""Functions whose value no launcher determines; those of the module ``random`` likewise."""

_WORDS = re.compile(rb"MASTER_ADDR|MASTER_PORT|RANK|WORLD_SIZE|init_process_group|init_distributed")
"""Words of which a program that fixes its ranks has at least one."""

_MOST_SHOWN = 3
_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))  # Python 3.10 has no except*
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


@dataclass(frozen=True, order=True)
class FixedRank:
    """A place where a program fixes ranks or an address.

    Args:
        what: predicate of the sentence about it.
    """

    path: Path
    line: int
    kind: Literal["variable", "group", "spawn"]
    what: str


def describe_fixed_ranks(found: Iterable[FixedRank], folder: Path) -> str:
    """Return where a program fixes its ranks, why that is wrong, and what to write.

    Args:
        found: what was found, at least one.
        folder: folder from which the paths are named.
    """
    found = sorted(found)
    places = [
        f"{each.path.relative_to(folder) if each.path.is_relative_to(folder) else each.path}:{each.line} {each.what}"
        for each in found[:_MOST_SHOWN]
    ]
    more = f"; {len(found) - _MOST_SHOWN} more places do the like" if len(found) > _MOST_SHOWN else ""
    kinds = {each.kind for each in found}
    advice = []
    if "spawn" in kinds:
        advice.append(
            "call the function once, with the rank int(os.environ['RANK']) and the device of "
            "int(os.environ['LOCAL_RANK']); process_count_per_instance is the number of processes of a node"
        )
    if "variable" in kinds:
        advice.append("set the variables with os.environ.setdefault(...), or only if 'RANK' is not in os.environ")
    if "group" in kinds or "spawn" in kinds:
        advice.append("call init_process_group() without init_method, rank and world_size")
    return (
        f"{'; '.join(places)}{more}. The elastic agent starts a process for each rank, as torchrun does, with RANK, "
        "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which change with the nodes; with other values the ranks "
        f"do not find each other. Instead: {'; '.join(advice)}."
    )


def find_fixed_ranks(files: Iterable[tuple[Path, bytes]]) -> tuple[FixedRank, ...]:
    """Return the places where a program fixes ranks or an address whatever its launcher is.

    Args:
        files: files of the program with their text, its own first.
    """
    units: list[_Unit] = []
    texts = list(files)
    if not any(_WORDS.search(text) for _, text in texts):
        return ()
    for path, text in texts:
        tree = parse_quietly(text)
        if tree is not None:
            # Of a module without these words only the calls matter, which need neither constants nor imports.
            fixes = _WORDS.search(text) is not None
            imports = imported_names(tree) if fixes else {}
            constants = _constants(tree, imports) if fixes else {}
            units += _Unit(path, not units, constants, imports).walk(tree.body)
    return tuple(sorted(set(_found(_reached(units)))))


@dataclass(eq=False)
class _Unit:
    """The statements of a module or a function that are executed whenever it is.

    Args:
        is_main: whether the file is the program's own.
        constants: values of the module's names that are assigned once, to a fixed value.
        imports: what the names stand for that the module imports.
        owner: class of the function, empty without one.
        nodes: expressions and statements that are executed in any case, without nested blocks and functions.
        functions: functions that are defined in it, with the names of their classes.
        class_: class whose body is being walked through.
    """

    path: Path
    is_main: bool
    constants: Mapping[str, ast.expr]
    imports: Mapping[str, str]
    name: str = ""
    owner: str = ""
    nodes: list[ast.AST] = field(default_factory=list)
    functions: list[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]] = field(default_factory=list)
    class_: str = ""

    @property
    def references(self) -> set[str]:
        """Names of functions and classes that the unit may call, or pass on to a caller."""
        names = {node.id for node in self.nodes if isinstance(node, ast.Name)}
        return names | {node.attr for node in self.nodes if isinstance(node, ast.Attribute)}

    def full_name(self, node: ast.AST) -> str:
        """Return a dotted name with the module that its first part stands for."""
        return full_name(node, self.imports)

    def is_fixed(self, value: ast.AST) -> bool:
        """Return whether a value is the same whatever the launcher, the arguments and the environment are."""
        return _is_fixed(value, self.constants, self.imports)

    def walk(self, body: Iterable[ast.stmt]) -> Iterator[_Unit]:
        """Collect what the unit executes; yield it and the units of the functions that are defined in it."""
        self._block(body)
        yield self
        for owner, function in self.functions:
            below = replace(self, name=function.name, owner=owner, nodes=[], functions=[])
            yield from below.walk(function.body)

    def _block(self, body: Iterable[ast.stmt], *, certain: bool = True) -> bool:
        """Walk through statements; return whether what follows them is executed in any case."""
        for statement in body:
            certain = self._statement(statement, certain=certain)
        return certain

    def _statement(self, statement: ast.stmt, *, certain: bool) -> bool:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            self.functions.append((self.class_, statement))
            for decorator in statement.decorator_list if certain else ():
                self._expression(decorator)
            return certain
        if isinstance(statement, ast.ClassDef):
            owner, self.class_ = self.class_, statement.name
            self._block(statement.body, certain=certain)
            self.class_ = owner
            return certain
        blocks = [value for value in ast.iter_child_nodes(statement) if isinstance(value, ast.stmt)]
        if certain:
            for value in ast.iter_child_nodes(statement):
                if not isinstance(value, (ast.stmt, ast.excepthandler, ast.match_case)):
                    self._expression(value)
            if not blocks:
                self.nodes.append(statement)
        if isinstance(statement, ast.If):
            return self._if(statement, certain=certain)
        if isinstance(statement, _TRY):
            after = self._block(statement.body, certain=certain)
            for handler in statement.handlers:
                self._block(handler.body, certain=False)
            return self._block([*statement.orelse, *statement.finalbody], certain=after)
        if isinstance(statement, (ast.With, ast.AsyncWith)):
            return self._block(statement.body, certain=certain)
        if isinstance(statement, (ast.For, ast.AsyncFor, ast.While)):
            self._block(statement.body, certain=certain)
            self._block(statement.orelse, certain=False)
            return certain
        for case in getattr(statement, "cases", ()):
            self._block(case.body, certain=False)
        return certain

    def _if(self, statement: ast.If, *, certain: bool) -> bool:
        test = statement.test
        if isinstance(test, ast.Compare) and dotted_name(test.left) == "__name__":
            return self._block(statement.body, certain=certain and self.is_main)
        self._block(statement.body, certain=False)
        self._block(statement.orelse, certain=False)
        return certain and not any(_leaves(block) for block in (statement.body, statement.orelse))

    def _expression(self, node: ast.AST) -> None:
        self.nodes.append(node)
        if isinstance(node, ast.Lambda):
            return
        below: list[ast.AST] = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.IfExp):
            below = [node.test]
        elif isinstance(node, ast.BoolOp):
            below = [node.values[0]]
        for child in below:
            self._expression(child)


def _leaves(block: list[ast.stmt]) -> bool:
    """Return whether a block may leave the function or the loop, or end the program, anywhere in it."""
    for statement in block:
        for node in ast.walk(statement):
            if isinstance(node, _LEAVING):
                return True
            if isinstance(node, ast.Call) and dotted_name(node.func).rpartition(".")[2] in ("exit", "_exit", "quit"):
                return True
    return False


def _reached(units: list[_Unit]) -> list[_Unit]:
    """Return the units that the program executes in any case: its modules, and the functions that those refer to."""
    reached = [unit for unit in units if not unit.name]
    left = [unit for unit in units if unit.name]
    names: set[str] = set()
    new = reached
    while new:
        names.update(*(unit.references for unit in new))
        # Python calls methods such as __init__ and __call__ of a class that is referred to.
        new = [unit for unit in left if unit.name in names or (unit.owner in names and unit.name.startswith("__"))]
        reached = [*reached, *new]
        left = [unit for unit in left if unit not in new]
    return reached


def _found(units: Iterable[_Unit]) -> Iterator[FixedRank]:
    spawns: list[FixedRank] = []
    gives_rank = False
    for unit in units:
        for node in unit.nodes:
            for name, value in _assigned(unit, node):
                if name in _VARIABLES and unit.is_fixed(value):
                    gives_rank = True
                    yield FixedRank(unit.path, value.lineno, "variable", f"sets {name} to {ast.unparse(value)}")
            if not isinstance(node, ast.Call):
                continue
            called = unit.full_name(node.func)
            if called.rpartition(".")[2] in _GROUPS:
                gives_rank |= any(keyword.arg == "rank" for keyword in node.keywords)
                yield from _of_group(unit, node)
            elif called in _SPAWNS:
                what = f"starts its ranks itself by {dotted_name(node.func)}()"
                spawns.append(FixedRank(unit.path, node.lineno, "spawn", what))
    if gives_rank:  # otherwise the processes prepare data, or the like
        yield from spawns


def _assigned(unit: _Unit, node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names and values of environment variables that a node sets."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and unit.full_name(target.value) == "os.environ":
                yield _text(target.slice), node.value
    elif isinstance(node, ast.Call):
        called = unit.full_name(node.func)
        if called == "os.environ.update":
            yield from ((keyword.arg or "", keyword.value) for keyword in node.keywords)
            for argument in node.args:
                if isinstance(argument, ast.Dict):
                    pairs = zip(argument.keys, argument.values, strict=True)
                    yield from ((_text(key), value) for key, value in pairs if key is not None)
        elif called == "os.putenv" and len(node.args) == len(("name", "value")):
            yield _text(node.args[0]), node.args[1]


def _of_group(unit: _Unit, call: ast.Call) -> Iterator[FixedRank]:
    """Yield what a call that opens the process group fixes."""
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if "store" in given:
        return
    if len(call.args) > 1:
        given["init_method"] = call.args[1]
    method = given.get("init_method")
    called = dotted_name(call.func).rpartition(".")[2]
    if isinstance(method, ast.Name):
        method = unit.constants.get(method.id)
    if isinstance(method, ast.Constant) and isinstance(method.value, str) and method.value.startswith(_ADDRESSES):
        yield FixedRank(unit.path, call.lineno, "group", f"calls {called}() with init_method={method.value!r}")
        return
    for name in ("rank", "world_size"):
        value = given.get(name)
        text = "-1" if value is None else ast.unparse(value)
        if value is not None and text != "-1" and unit.is_fixed(value):
            yield FixedRank(unit.path, call.lineno, "group", f"calls {called}() with {name}={text}")
            return


def _is_fixed(value: ast.AST, constants: Mapping[str, ast.expr], imports: Mapping[str, str]) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is not None
    if isinstance(value, ast.Name):
        return value.id in constants
    parts: list[ast.expr] | None = None
    if isinstance(value, ast.JoinedStr):
        parts = value.values
    elif isinstance(value, ast.FormattedValue):
        parts = [value.value]
    elif isinstance(value, ast.UnaryOp):
        parts = [value.operand]
    elif isinstance(value, ast.BinOp):
        parts = [value.left, value.right]
    elif isinstance(value, ast.Call):
        called = full_name(value.func, imports)
        if called in _FIXED_CALLS or called.startswith("random."):
            parts = value.args
    return parts is not None and all(_is_fixed(part, constants, imports) for part in parts)


def _constants(tree: ast.Module, imports: Mapping[str, str]) -> dict[str, ast.expr]:
    """Return the values of those names that a module assigns once, to a fixed value, and uses for nothing else."""
    uses: Counter[str] = Counter(dict.fromkeys(imports, 2))  # what is imported is no constant of this module
    values: dict[str, ast.expr] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, (ast.Store, ast.Del)):
            uses[node.id] += 1
        elif isinstance(node, ast.arg):
            uses[node.arg] += 2  # a parameter may have any value
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    return {name: value for name, value in values.items() if uses[name] == 1 and _is_fixed(value, {}, imports)}


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
