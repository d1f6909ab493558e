"""The search space of a sweep: the values of its trials, and which trial is the best."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from azureml_elastic.errors import UsageError

_BOUNDS, _BELL = ("min_value", "max_value"), ("mu", "sigma")
_ARGUMENTS = {
    "choice": ("values",),
    "randint": ("upper",),
    "uniform": _BOUNDS,
    "loguniform": _BOUNDS,
    "normal": _BELL,
    "lognormal": _BELL,
    "quniform": (*_BOUNDS, "q"),
    "qloguniform": (*_BOUNDS, "q"),
    "qnormal": (*_BELL, "q"),
    "qlognormal": (*_BELL, "q"),
}
"""Names of the arguments by the type of an expression; jobs have them in this order, steps of pipelines by name."""

_REPEATED = 100
"""Drawn points in succession that there have been before, after which the space has no further ones."""


@dataclass(frozen=True)
class Expression:
    """How the value of a parameter is drawn, as ``("uniform", (0.1, 0.5))``."""

    type: str
    arguments: tuple[Any, ...]

    def draw(self, source: random.Random) -> str:
        """Draw a value, as it is written in a command."""
        if self.type == "choice":
            return text_of(source.choice(self.arguments[0]))
        if self.type == "randint":
            return str(source.randrange(int(self.arguments[0])))
        first, second = map(float, self.arguments[:2])
        value = source.gauss(first, second) if self.type.endswith("normal") else source.uniform(first, second)
        if "log" in self.type:
            # As in Azure ML, whose bounds of a loguniform parameter are those of the logarithm.
            value = math.exp(value)
        if self.type.startswith("q"):
            step = float(self.arguments[2])
            value = round(value / step) * step
        return text_of(value)


@dataclass(frozen=True)
class SearchSpace:
    """The parameters of a sweep, and how the points of its trials are chosen.

    Args:
        expressions: how each parameter is drawn, by name.
        sampling: ``grid`` for all combinations, ``random`` for random ones.
        seed: start of the random generator; ``None`` for another one each time.
    """

    expressions: Mapping[str, Expression]
    sampling: Literal["grid", "random"]
    seed: int | None = None

    def points(self) -> Iterator[dict[str, str]]:
        """Yield the points, each with a value for every parameter and none twice."""
        names = list(self.expressions)
        if self.sampling == "grid":
            choices = [[text_of(value) for value in each.arguments[0]] for each in self.expressions.values()]
            yield from (dict(zip(names, values, strict=True)) for values in itertools.product(*choices))
            return
        source = random.Random(self.seed)
        known: set[tuple[str, ...]] = set()
        repeated = 0
        while repeated < _REPEATED:
            point = {name: each.draw(source) for name, each in self.expressions.items()}
            repeated = repeated + 1 if tuple(point.values()) in known else 0
            if not repeated:
                known.add(tuple(point.values()))
                yield point


def read_search_space(parameters: Mapping[str, Any], algorithm: Mapping[str, Any] | str | None) -> SearchSpace:
    """Parse the search space and the sampling algorithm of a sweep's document.

    Raises:
        UsageError: the local workspace does not sample so, or cannot draw from such a space.
    """
    if not parameters:
        raise UsageError("The sweep has no search space. Give at least one parameter, such as lr: choice.")
    expressions = {name: _read(name, value) for name, value in parameters.items()}
    if not isinstance(algorithm, Mapping):
        algorithm = {"type": algorithm or "random"}
    sampling = str(algorithm.get("samplingAlgorithmType") or algorithm.get("type")).lower()
    rule = str(algorithm.get("rule") or "random").lower()
    if sampling not in ("grid", "random") or rule != "random":
        ruled = f" with the rule {rule}" if rule != "random" else ""
        raise UsageError(
            f"The local workspace chooses trials by the algorithms grid and random, not {sampling}{ruled}. Submit the "
            "sweep with sampling_algorithm='random'."
        )
    drawn = [name for name, each in expressions.items() if each.type != "choice"]
    if sampling == "grid" and drawn:
        raise UsageError(
            f"A grid is made of choices, and {drawn[0]!r} is of type {expressions[drawn[0]].type!r}. Give it values as "
            "a choice, or sampling_algorithm='random'."
        )
    seed = algorithm.get("seed")
    return SearchSpace(expressions, "grid" if sampling == "grid" else "random", None if seed is None else int(seed))


def _read(name: str, value: Any) -> Expression:
    kind, arguments = (value.get("type"), []) if isinstance(value, Mapping) else value
    if isinstance(value, Mapping):
        arguments = [value[each] for each in _ARGUMENTS.get(kind, ()) if each in value]
    if len(_ARGUMENTS.get(kind, ())) != len(arguments) or not arguments:
        raise UsageError(f"The parameter {name!r} is {value!r:.200}, which is no search expression of azure-ai-ml.")
    if kind == "choice":
        if not arguments[0] or any(isinstance(each, (Mapping, list)) for each in arguments[0]):
            raise UsageError(
                f"The parameter {name!r} is a choice of {arguments[0]!r:.200}. The local workspace chooses among "
                "texts, numbers and truth values; give at least one."
            )
    elif kind == "randint" and int(arguments[0]) < 1:
        raise UsageError(f"The parameter {name!r} is below {arguments[0]}, which no number from 0 is. Give at least 1.")
    return Expression(kind, tuple(arguments))


def best_trial(values: Mapping[str, Sequence[float]], *, maximize: bool) -> tuple[str, float] | None:
    """Return the best trial and its best value, ``None`` if no trial has logged the metric.

    Args:
        values: all values of the primary metric by trial, in the order in which the trials began.
    """
    # Of finite values alone: NaN is neither below nor above another one, and could come out as the best.
    best = max if maximize else min
    reached = {
        name: best(finite) for name, given in values.items() if (finite := [x for x in given if math.isfinite(x)])
    }
    if not reached:
        return None
    name = best(reached, key=reached.__getitem__)
    return name, reached[name]


def text_of(value: Any) -> str:
    """Return a literal as it is written in a command."""
    return str(value).lower() if isinstance(value, bool) else str(value)


_EXPRESSION = re.compile(r"\$\{\{\s*([^{}]*?)\s*\}\}")
_OPTIONAL = re.compile(r"\$\[\[(.*?)\]\]", re.DOTALL)
_NAMED = re.compile(r"(inputs|outputs)\.([\w.]+)")
_SEARCHED = re.compile(r"search_space\.([\w.]+)")
_BOUND = re.compile(r"parent\.(?:jobs\.(?P<step>[\w-]+)\.)?(?P<kind>inputs|outputs)\.(?P<name>[\w.]+)")


def expand(text: str, inputs: Mapping[str, str], outputs: Mapping[str, str]) -> str:
    """Return the text with each expression replaced by its value.

    An optional part ``$[[...]]`` is kept if all its inputs have values, and removed otherwise. Inputs without a value
    are not in ``inputs``.
    """
    known = {"inputs": inputs, "outputs": outputs}

    def value(match: re.Match[str]) -> str:
        named = _NAMED.fullmatch(match[1])
        if named is None:
            raise UsageError(
                f"The local workspace does not support the expression {match[0]}. In a command write "
                "${{inputs.<name>}} or ${{outputs.<name>}}."
            )
        found = known[named[1]].get(named[2])
        if found is None:
            there = ", ".join(sorted(known[named[1]])) or "none"
            raise UsageError(f"The expression {match[0]} refers to no value; the job's {named[1]} are: {there}.")
        return found

    def option(match: re.Match[str]) -> str:
        names = [_NAMED.fullmatch(found) for found in _EXPRESSION.findall(match[1])]
        missing = any(name is not None and name[2] not in known[name[1]] for name in names)
        return "" if missing else match[1]

    return _EXPRESSION.sub(value, _OPTIONAL.sub(option, text))


def with_values(text: str, values: Mapping[str, str]) -> str:
    """Return the text with each ``${{search_space.x}}`` replaced by its value; raises ``UsageError`` without one."""

    def value(match: re.Match[str]) -> str:
        searched = _SEARCHED.fullmatch(match[1])
        if searched is not None and searched[1] not in values:
            raise UsageError(
                f"The expression {match[0]} refers to no value; the search space has: {', '.join(sorted(values))}."
            )
        return match[0] if searched is None else values[searched[1]]

    return _EXPRESSION.sub(value, text)


def as_searched(text: str, names: Collection[str]) -> str:
    """Return the text with ``${{inputs.x}}`` as ``${{search_space.x}}`` for each of these inputs."""
    searched = {f"inputs.{name}": f"${{{{search_space.{name}}}}}" for name in names}
    return _EXPRESSION.sub(lambda match: searched.get(match[1], match[0]), text)


def read_binding(value: object) -> re.Match[str] | None:
    """Return what ``${{parent.inputs.x}}`` or ``${{parent.jobs.step.outputs.x}}`` refers to, ``None`` for plain values.

    The groups are the ``kind``, its ``name``, and the ``step`` that has it, ``None`` for the pipeline itself. Another
    expression raises ``UsageError``.
    """
    if not isinstance(value, str) or "${{" not in value:
        return None
    match = _EXPRESSION.fullmatch(value.strip())
    bound = _BOUND.fullmatch(match[1]) if match is not None else None
    if bound is None or (bound["step"] is not None and bound["kind"] == "inputs"):
        raise UsageError(
            f"The local workspace does not support the binding {value!r}. Bind to ${{{{parent.inputs.<name>}}}}, "
            "${{parent.outputs.<name>}} or ${{parent.jobs.<step>.outputs.<name>}}."
        )
    return bound
