"""Messages about jobs in the terms of a file: an expression of Python becomes the field of the file and its value.

``resources={'placement': 'gang'}`` becomes ``elastic.placement: gang``, ``ElasticDistribution(framework="ray")``
becomes ``elastic.distribution.framework: ray``. What is no such expression stays as it is.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from typing import Any

from azureml_elastic.errors import CommandError, SubmitError, needs_extra
from azureml_elastic.submit.yaml.elastic_block import BLOCK, COUNTS, ELSEWHERE, block_model

with needs_extra("PyYAML", "submit"):
    import yaml

_BEGIN = re.compile(r"(?<![\w.$'\"{\[(-])(?:(?P<name>[A-Za-z_][\w.]*)=(?=[\w'\"{\[(])|(?P<call>[A-Za-z_][\w.]*)\()")
_PATH = re.compile(r"[a-z_.]+: ")
_TWICE = re.compile(r"(?<!\S)([\w.]+): (?=\1[.:])")
_BRACKETS = {"(": ")", "[": "]", "{": "}"}
_MODELS = {
    "ElasticDistribution": "distribution",
    "ElasticResources": "resources",
    "CheckpointPolicy": "checkpoint",
    "ReplacementPolicy": "replacement",
}
_ENTRIES = frozenset({"Input", "Output", "NodePool", "JobService"})
_CALLS = frozenset({"with_options", "model_copy", "sweep", "from_command", "job"})
_OF_SWEEP = frozenset({"compute", "inputs", "outputs", "resources", "search_space"})
_EVERYWHERE = frozenset({"path", "name", "type", "mode", "kind"})


@contextlib.contextmanager
def translated_errors(where: str = "") -> Iterator[None]:
    """Translate the messages of errors about a job, each of which names a field of the file, or the job, once.

    Args:
        where: path of the job in its file, with a dot at its end.
    """
    try:
        yield
    except (SubmitError, CommandError) as error:
        text = _TWICE.sub("", in_terms_of_yaml(str(error), where))
        if where not in text and not _PATH.match(text):
            text = f"{where}command: {text}" if isinstance(error, CommandError) else f"{where[:-1]}: {text}"
        raise type(error)(text) from None


def in_terms_of_yaml(text: str, where: str = "") -> str:
    """Return a message with its expressions of Python as fields of the file."""
    parts, position = [], 0
    while (match := _BEGIN.search(text, position)) is not None:
        end = _end(text, match.end() - 1 if match["call"] else match.end())
        begin = match.start() if match["call"] else match.end()
        fields = None if end is None else _fields_of(match["name"], text[begin:end], where)
        stop = match.end() if fields is None or end is None else end
        parts += [text[position : match.start()], text[match.start() : stop] if fields is None else fields]
        position = stop
    return "".join([*parts, text[position:]])


def _end(text: str, start: int) -> int | None:
    """Return the end of the expression that begins at a position, with what is called on its result."""
    open_, quote = [], ""
    for at in range(start, len(text)):
        character = text[at]
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _BRACKETS:
            open_.append(_BRACKETS[character])
        elif open_ and character == open_[-1]:
            open_.pop()
        if not quote and not open_:
            after = text[at + 1 : at + 2]
            if not (character.isalnum() or character in "_.") and after not in {".", "("}:
                return at + 1 if character in "'\")]}" else at
            if after == "." and not text[at + 2 : at + 3].isalpha():
                return at + 1
            if not after or after in " ,;:)":
                return at + 1
    return None


def _fields_of(name: str | None, expression: str, where: str) -> str | None:
    """Return the fields that an expression, or its assignment to a name, sets; ``None`` if it is none about a job."""
    try:
        node = ast.parse(expression, mode="eval").body
    except SyntaxError:
        return None
    found = list(_found(node, where) if name is None else _assigned(name, node, where))
    return " and ".join(found) if found else None


def _found(node: ast.AST, where: str) -> Iterator[str]:
    if not isinstance(node, ast.Call):
        return
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if isinstance(node.func, ast.Attribute):  # as in job.with_options(...).sweep(...)
        yield from _found(node.func.value, where)
    if called in _MODELS:
        for keyword in node.keywords:
            yield from _assigned(f"{_MODELS[called]}.{keyword.arg}", keyword.value, where)
    elif called in _ENTRIES:
        yield _flow(node)
    elif called in _CALLS:
        for keyword in node.keywords:
            if keyword.arg == "update" and isinstance(keyword.value, ast.Dict):
                for name, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                    yield from _assigned(str(_value(name)), value, where)
            elif keyword.arg is not None:
                yield from _assigned(keyword.arg, keyword.value, where)


def _assigned(path: str, value: ast.AST, where: str) -> Iterator[str]:
    """Yield the fields that an assignment sets, and what has a mapping or a model as its value field by field."""
    if isinstance(value, ast.Call) and getattr(value.func, "id", "") in _MODELS:
        for keyword in value.keywords:
            yield from _assigned(f"{path}.{keyword.arg}", keyword.value, where)
    elif isinstance(value, ast.Dict) and path in {"resources", *block_model().model_fields}:
        for name, one in zip(value.keys, value.values, strict=True):
            yield from _assigned(f"{path}.{_value(name)}", one, where)
    elif (place := _place(path)) is not None:
        outside = not place.startswith(f"{BLOCK}.") and place.partition(".")[0] in {
            "compute",
            "inputs",
            "outputs",
            "search_space",
        }
        before = "" if where == "trial." and outside else where
        yield f"{before}{place}: {'N' if place.endswith('_count') and _value(value) == '...' else _flow(value)}"


def _place(path: str) -> str | None:
    """Return the path in a file of a field of an elastic job; ``None`` if there is none."""
    first, _, rest = path.partition(".")
    block = block_model().model_fields
    if first == "resources":
        return f"{BLOCK}.{rest}" if rest in COUNTS else path
    if first == "compute" and rest:
        return None
    if first in block or first in COUNTS:
        return f"{BLOCK}.{path}"
    nested = [
        name
        for name, info in block.items()
        if first in getattr(info.annotation, "model_fields", {}) and not rest and first not in _EVERYWHERE
    ]
    if len(nested) == 1:
        return f"{BLOCK}.{nested[0]}.{path}"
    known = {"code", "command", "environment", "environment_variables", "compute", "inputs", "outputs", "services"}
    return ELSEWHERE.get(path, path if first in {*known, "identity", "name", "search_space"} else None)


def _flow(value: ast.AST) -> str:
    text: str = yaml.safe_dump(_value(value), default_flow_style=True, sort_keys=False, allow_unicode=True, width=4096)
    return text.removesuffix("\n...\n").strip().replace("'...'", "...")


def _value(node: ast.AST | None) -> Any:
    """Return what stands for an expression: a literal, the fields of an object, or its source."""
    if isinstance(node, ast.Constant):
        return "..." if node.value is ... else node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(one) for one in node.elts]
    if isinstance(node, ast.Dict):
        return {_value(name): _value(one) for name, one in zip(node.keys, node.values, strict=True)}
    if isinstance(node, ast.Call):
        first = {"compute": _value(node.args[0])} if node.args and getattr(node.func, "id", "") == "NodePool" else {}
        return first | {str(one.arg): _value(one.value) for one in node.keywords}
    return "" if node is None else ast.unparse(node)
