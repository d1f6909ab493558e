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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from azureml_elastic.program.source import Module, dotted_name, text_of

_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"})
_GROUPS = frozenset({"init_distributed", "init_process_group"})
"""Functions of torch and DeepSpeed that open the process group."""

_SPAWNS = frozenset(f"torch.multiprocessing.{name}" for name in ("spawn", "spawn.spawn", "start_processes"))
_FIXED_CALLS = frozenset({"int", "str", "os.cpu_count", "socket.gethostname", "torch.cuda.device_count"})
"""Functions whose value no launcher determines; those of the module ``random`` likewise."""

_WORDS = re.compile("|".join((*_VARIABLES, *_GROUPS)).encode())
"""Words of which a program that fixes its ranks has at least one."""

_MOST_SHOWN = 3
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


def describe_fixed_ranks(modules: Sequence[Module], folder: Path) -> str:
    """Return where a program fixes its ranks, why that is wrong, and what to write; empty if it does not.

    Args:
        modules: modules of the program, its own first.
        folder: folder from which the paths are named.
    """
    found = find_fixed_ranks(modules)
    if not found:
        return ""
    paths = {module.path: module for module in modules}
    places = [f"{paths[each.path].place(folder, each.line)} {each.what}" for each in found[:_MOST_SHOWN]]
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
    if kinds != {"variable"}:
        advice.append("call init_process_group() without init_method, rank and world_size")
    return (
        f"{'; '.join(places)}{more}. The elastic agent starts a process for each rank, as torchrun does, with RANK, "
        "LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which change with the nodes; with other values the ranks "
        f"do not find each other. Instead: {'; '.join(advice)}."
    )


def find_fixed_ranks(modules: Sequence[Module]) -> list[FixedRank]:
    """Return the places where a program fixes ranks or an address whatever its launcher is.

    Args:
        modules: modules of the program, its own first.
    """
    if not any(_WORDS.search(module.text) for module in modules):
        return []
    units = [
        unit
        for module in modules
        for unit in _Unit(module, _constants(module), module is modules[0]).walk(module.tree.body)
    ]
    found: list[FixedRank] = []
    gives_rank = False
    for unit in _reached(units):
        for node in unit.nodes:
            for each in unit.fixed(node):
                found.append(each)
                gives_rank |= each.kind == "variable"
            if isinstance(node, ast.Call) and dotted_name(node.func).rpartition(".")[2] in _GROUPS:
                gives_rank |= any(keyword.arg == "rank" for keyword in node.keywords)
    # Processes that are given no rank prepare data, or the like.
    return sorted({each for each in found if gives_rank or each.kind != "spawn"})


@dataclass(eq=False)
class _Unit:
    """The statements of a module or a function that are executed whenever it is.

    Args:
        constants: values of the module's names that are assigned once, to a fixed value.
        is_main: whether the module is the program's own.
        owner: class of the function, empty without one.
        nodes: expressions and statements that are executed in any case, without nested blocks and functions.
        functions: functions that are defined in it, with the names of their classes.
        class_: class whose body is being walked through.
    """

    module: Module
    constants: Mapping[str, ast.expr]
    is_main: bool
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

    def walk(self, body: Iterable[ast.stmt]) -> Iterator[_Unit]:
        """Collect what the unit executes; yield it and the units of the functions that are defined in it."""
        self._block(body, certain=True)
        yield self
        for owner, function in self.functions:
            below = replace(self, name=function.name, owner=owner, nodes=[], functions=[])
            yield from below.walk(function.body)

    def _block(self, body: Iterable[ast.stmt], *, certain: bool) -> bool:
        """Walk through statements; return whether what follows them is executed in any case."""
        for statement in body:
            certain = self._statement(statement, certain=certain)
        return certain

    def _statement(self, statement: ast.stmt, *, certain: bool) -> bool:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            self.functions.append((self.class_, statement))
            for decorator in statement.decorator_list if certain else ():
                self._visit(decorator)
            return certain
        if isinstance(statement, ast.ClassDef):
            owner, self.class_ = self.class_, statement.name
            self._block(statement.body, certain=certain)
            self.class_ = owner
            return certain
        if certain:
            self._visit(statement)
        body, orelse = getattr(statement, "body", []), getattr(statement, "orelse", [])
        match statement:
            case ast.If(test=ast.Compare(left=ast.Name("__name__"))):
                return self._block(body, certain=certain and self.is_main)
            case ast.If():
                self._block([*body, *orelse], certain=False)
                return certain and not _leaves(statement)
            case ast.For() | ast.AsyncFor() | ast.While():
                self._block(body, certain=certain)
                self._block(orelse, certain=False)
                return certain
        for part in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            self._block(part.body, certain=False)
        # What is left is a with, a try or a statement without blocks.
        return self._block([*body, *orelse, *getattr(statement, "finalbody", ())], certain=certain)

    def _visit(self, node: ast.AST) -> None:
        self.nodes.append(node)
        below: Iterable[ast.AST] = ast.iter_child_nodes(node)
        if isinstance(node, ast.Lambda):
            below = ()
        elif isinstance(node, ast.IfExp):
            below = [node.test]
        elif isinstance(node, ast.BoolOp):
            below = node.values[:1]
        for child in below:
            if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
                self._visit(child)

    def fixed(self, node: ast.AST) -> Iterator[FixedRank]:
        """Yield what a node fixes."""
        for name, value in self._assigned(node):
            if name in _VARIABLES and self._is_fixed(value):
                what = f"sets {name} to {ast.unparse(value)}"
                yield FixedRank(self.module.path, value.lineno, "variable", what)
        if not isinstance(node, ast.Call):
            return
        called = self.module.full_name(node.func)
        if called in _SPAWNS:
            what = f"starts its ranks itself by {dotted_name(node.func)}()"
            yield FixedRank(self.module.path, node.lineno, "spawn", what)
        elif (name := called.rpartition(".")[2]) in _GROUPS and (argument := self._of_group(node)):
            yield FixedRank(self.module.path, node.lineno, "group", f"calls {name}() with {argument}")

    def _assigned(self, node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
        """Yield the names and values of environment variables that a node sets."""
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Subscript) and self.module.full_name(target.value) == "os.environ":
                    yield text_of(target.slice), node.value
        elif isinstance(node, ast.Call):
            called = self.module.full_name(node.func)
            if called == "os.environ.update":
                yield from ((keyword.arg or "", keyword.value) for keyword in node.keywords)
                for argument in node.args:
                    if isinstance(argument, ast.Dict):
                        pairs = zip(argument.keys, argument.values, strict=True)
                        yield from ((text_of(key), value) for key, value in pairs if key is not None)
            elif called == "os.putenv" and len(node.args) == len(("name", "value")):
                yield text_of(node.args[0]), node.args[1]

    def _of_group(self, call: ast.Call) -> str:
        """Return the argument with which a call that opens the process group fixes a rank or an address."""
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        if "store" in given:
            return ""
        method = call.args[1] if len(call.args) > 1 else given.get("init_method")
        if isinstance(method, ast.Name):
            method = self.constants.get(method.id)
        if method is not None and text_of(method).startswith(("tcp://", "file://")):
            return f"init_method={text_of(method)!r}"
        texts = {name: ast.unparse(given[name]) for name in ("rank", "world_size") if name in given}
        fixed = (f"{name}={text}" for name, text in texts.items() if text != "-1" and self._is_fixed(given[name]))
        return next(fixed, "")

    def _is_fixed(self, value: ast.AST) -> bool:
        """Return whether a value is the same whatever the launcher, the arguments and the environment are."""
        return _is_fixed(value, self.module, self.constants)


def _leaves(statement: ast.stmt) -> bool:
    """Return whether a statement may leave the function or the loop, or end the program, anywhere in it."""
    return any(
        isinstance(node, _LEAVING)
        or (isinstance(node, ast.Call) and dotted_name(node.func).rpartition(".")[2] in ("exit", "_exit", "quit"))
        for node in ast.walk(statement)
    )


def _reached(units: list[_Unit]) -> list[_Unit]:
    """Return the units that the program executes in any case: its modules, and the functions that those refer to."""
    reached: list[_Unit] = []
    names = {""}  # of modules
    # Python calls methods such as __init__ and __call__ of a class that is referred to.
    while new := [
        unit
        for unit in units
        if unit.name in names or (unit.owner and unit.owner in names and unit.name.startswith("__"))
    ]:
        reached += new
        units = [unit for unit in units if unit not in new]
        names.update(*(unit.references for unit in new))
    return reached


def _is_fixed(value: ast.AST, module: Module, constants: Collection[str]) -> bool:
    if isinstance(value, ast.Constant):
        return value.value is not None
    if isinstance(value, ast.Name):
        return value.id in constants
    parts: Iterable[ast.AST] | None = None
    if isinstance(value, ast.JoinedStr | ast.FormattedValue | ast.UnaryOp | ast.BinOp):
        parts = [part for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr)]
    elif isinstance(value, ast.Call):
        called = module.full_name(value.func)
        parts = value.args if called in _FIXED_CALLS or called.startswith("random.") else None
    return parts is not None and all(_is_fixed(part, module, constants) for part in parts)


def _constants(module: Module) -> dict[str, ast.expr]:
    """Return the values of those names that a module assigns once, to a fixed value, and uses for nothing else."""
    uses: Counter[str] = Counter(dict.fromkeys(module.names, 2))  # what is imported is no constant of this module
    values: dict[str, ast.expr] = {}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store | ast.Del):
            uses[node.id] += 1
        elif isinstance(node, ast.arg):
            uses[node.arg] += 2  # a parameter may have any value
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            values[node.targets[0].id] = node.value
    return {name: value for name, value in values.items() if uses[name] == 1 and _is_fixed(value, module, ())}
