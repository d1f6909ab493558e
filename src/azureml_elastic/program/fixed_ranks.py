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
from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

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
_UNSET = ast.Constant(None)
_NAMES = (ast.Name, ast.Attribute)
_TRY = (ast.Try, getattr(ast, "TryStar", ast.Try))  # Python 3.10 has no except*
_LEAVING = (ast.Return, ast.Raise, ast.Continue, ast.Break)


class FixedRank(NamedTuple):
    """A place where a program fixes ranks or an address, and the predicate of the sentence about it."""

    path: str
    line: int
    kind: Literal["variable", "group", "spawn"]
    what: str


def describe_fixed_ranks(modules: Sequence[Module]) -> str:
    """Return where a program fixes its ranks, why that is wrong, and what to write; empty if it does not.

    Args:
        modules: modules of the program, its own first.
    """
    found = find_fixed_ranks(modules)
    if not found:
        return ""
    places = [f"{each.path}:{each.line} {each.what}" for each in found[:_MOST_SHOWN]]
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
    units = [unit for module in modules for unit in _units(module, is_main=module is modules[0])]
    reached = list(_reached(units))
    found = {each for unit in reached for node in unit.nodes for each in unit.fixed(node)}
    gives_rank = any(each.kind == "variable" for each in found) or any(
        keyword.arg == "rank"
        for unit in reached
        for node in unit.nodes
        if isinstance(node, ast.Call) and _last_name(node) in _GROUPS
        for keyword in node.keywords
    )
    # Processes that are given no rank prepare data, or the like.
    return sorted(each for each in found if gives_rank or each.kind != "spawn")


def _units(module: Module, *, is_main: bool) -> Iterator[_Unit]:
    """Yield the unit of a module, and those of the functions that are defined anywhere in it."""
    constants = _constants(module)
    yield _Unit(module, constants, "", "", list(_executed(module.tree.body, is_main=is_main)))
    classes = [node for node in module.nodes if isinstance(node, ast.ClassDef)]
    owners = {id(statement): each.name for each in classes for statement in each.body}
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            executed = list(_executed(node.body, is_main=is_main))
            yield _Unit(module, constants, node.name, owners.get(id(node), ""), executed)


@dataclass(frozen=True, eq=False)
class _Unit:
    """The expressions and statements of a module or a function that are executed whenever it is.

    Args:
        constants: values of the module's names that are assigned once, to a fixed value.
        owner: class of the function, empty without one.
    """

    module: Module
    constants: Mapping[str, ast.expr]
    name: str
    owner: str
    nodes: Sequence[ast.AST]

    def fixed(self, node: ast.AST) -> Iterator[FixedRank]:
        """Yield what a node fixes."""
        for name, value in self._assigned(node):
            if name in _VARIABLES and _is_fixed(value, self.module, self.constants):
                what = f"sets {name} to {ast.unparse(value)}"
                yield FixedRank(self.module.shown, value.lineno, "variable", what)
        if not isinstance(node, ast.Call):
            return
        if self.module.full_name(node.func) in _SPAWNS:
            what = f"starts its ranks itself by {dotted_name(node.func)}()"
            yield FixedRank(self.module.shown, node.lineno, "spawn", what)
        elif (name := _last_name(node)) in _GROUPS and (argument := self._of_group(node)):
            yield FixedRank(self.module.shown, node.lineno, "group", f"calls {name}() with {argument}")

    def _assigned(self, node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
        """Yield the names and values of environment variables that a node sets."""
        match node:
            case ast.Assign(targets, value):
                for target in targets:
                    if isinstance(target, ast.Subscript) and self.module.full_name(target.value) == "os.environ":
                        yield text_of(target.slice), value
            case ast.Call(function, arguments, keywords) if self.module.full_name(function) == "os.environ.update":
                yield from ((keyword.arg or "", keyword.value) for keyword in keywords)
                for argument in arguments:
                    if isinstance(argument, ast.Dict):
                        pairs = zip(argument.keys, argument.values, strict=True)
                        yield from ((text_of(key), value) for key, value in pairs if key is not None)
            case ast.Call(function, [name, value]) if self.module.full_name(function) == "os.putenv":
                yield text_of(name), value

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
        for name in ("rank", "world_size"):
            value = given.get(name, _UNSET)
            if ast.unparse(value) != "-1" and _is_fixed(value, self.module, self.constants):
                return f"{name}={ast.unparse(value)}"
        return ""


def _executed(body: Iterable[ast.stmt], *, is_main: bool) -> Generator[ast.AST, None, bool]:
    """Yield what is executed whenever a block is; return whether what follows the block is, too."""
    for statement in body:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for decorator in statement.decorator_list:
                    yield from _evaluated(decorator)
                continue
            case ast.ClassDef():
                yield from _executed(statement.body, is_main=is_main)
                continue
        yield from _evaluated(statement)
        blocks: list[ast.stmt] = []
        match statement:
            case ast.If(test=ast.Compare(left=ast.Name("__name__"))):
                blocks = statement.body if is_main else []
            case ast.If() if any(map(_leaves, ast.walk(statement))):
                return False
            case ast.For() | ast.AsyncFor() | ast.While():
                yield from _executed(statement.body, is_main=is_main)
            case ast.With() | ast.AsyncWith():
                blocks = statement.body
            case _ if isinstance(statement, _TRY):
                blocks = [*statement.body, *statement.orelse, *statement.finalbody]
        if not (yield from _executed(blocks, is_main=is_main)):
            return False
    return True


def _evaluated(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and what is evaluated whenever it is, without the statements of its blocks."""
    yield node
    below: Iterable[ast.AST] = ast.iter_child_nodes(node)
    if isinstance(node, ast.Lambda):
        below = ()
    elif isinstance(node, ast.IfExp):
        below = [node.test]
    elif isinstance(node, ast.BoolOp):
        below = node.values[:1]
    for child in below:
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield from _evaluated(child)


def _leaves(node: ast.AST) -> bool:
    """Return whether a node leaves the function or the loop, or ends the program."""
    return isinstance(node, _LEAVING) or (isinstance(node, ast.Call) and _last_name(node) in ("exit", "_exit", "quit"))


def _last_name(call: ast.Call) -> str:
    return dotted_name(call.func).rpartition(".")[2]


def _reached(units: list[_Unit]) -> Iterator[_Unit]:
    """Yield the units that the program executes in any case: its modules, and the functions that those refer to."""
    names = {""}  # of modules
    # Python calls methods such as __init__ and __call__ of a class that is referred to.
    while new := [
        unit for unit in units if unit.name in names or (unit.owner in names - {""} and unit.name.startswith("__"))
    ]:
        yield from new
        units = [unit for unit in units if unit not in new]
        nodes = [node for unit in new for node in unit.nodes]
        names.update(dotted_name(node).rpartition(".")[2] for node in nodes if isinstance(node, _NAMES))


def _is_fixed(value: ast.AST, module: Module, constants: Container[str]) -> bool:
    """Return whether a value is the same whatever the launcher, the arguments and the environment are."""
    parts: Iterable[ast.AST]
    match value:
        case ast.Constant(constant):
            return constant is not None
        case ast.Name(name):
            return name in constants
        case ast.JoinedStr() | ast.FormattedValue() | ast.UnaryOp() | ast.BinOp():
            parts = [part for part in ast.iter_child_nodes(value) if isinstance(part, ast.expr)]
        case ast.Call(function, parts):
            called = module.full_name(function)
            if called not in _FIXED_CALLS and not called.startswith("random."):
                return False
        case _:
            return False
    return all(_is_fixed(part, module, constants) for part in parts)


def _constants(module: Module) -> dict[str, ast.expr]:
    """Return the values of those names that a module assigns once, to a fixed value, and uses for nothing else."""
    uses: Counter[str] = Counter(dict.fromkeys(module.names, 2))  # what is imported is no constant of this module
    values: dict[str, ast.expr] = {}
    for node in module.nodes:
        match node:
            case ast.Name(name, ast.Store() | ast.Del()):
                uses[name] += 1
            case ast.arg(name):
                uses[name] += 2  # a parameter may have any value
            case ast.Assign([ast.Name(name)], value):
                values[name] = value
    return {name: value for name, value in values.items() if uses[name] == 1 and _is_fixed(value, module, ())}
