"""What can go wrong between a node and its table, as data, and which call it hits. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from azureml_elastic.errors import UsageError

__all__ = ["TROUBLES", "Disturbance", "Fate", "Trouble", "draw"]

Trouble = Literal["outage", "throttle", "timeout", "reset", "slow", "half", "garbage", "any"]
"""Kinds of trouble, see :class:`Disturbance`."""

TROUBLES: tuple[Trouble, ...] = get_args(Trouble)
_OF_CALLS: tuple[Trouble, ...] = tuple(kind for kind in TROUBLES if kind not in ("outage", "any"))


@dataclass(frozen=True)
class Disturbance:
    """One kind of trouble and the calls that it hits.

    ========  ================================================================================================
    outage    connections are refused, those that are open are reset; a call that is under way loses its answer
    throttle  HTTP 503 ``ServerBusy``, with or without ``Retry-After``; the call does not reach the table
    timeout   no answer at all, until the client hangs up
    reset     the connection is reset instead of an answer
    slow      the answer comes late, or the call itself reaches the table late, perhaps after the client gave up
    half      the call is carried out, half of its answer comes, then the connection is reset
    garbage   an HTML page of some box in between, with a status of its own
    any       each call draws one of these but ``outage``
    ========  ================================================================================================

    Args:
        kind: see above.
        share: of the calls that are hit, above 0 to 1; an outage hits all.
        arrives: whether a call that gets no proper answer has reached the table nevertheless; for ``slow``, whether
            the answer is late (true) or the call (false). ``None`` draws it for each call.
        delay_s: the shortest and the longest delay of ``slow``, in seconds.
        retry_after_s: one is drawn for each throttled call; 0 sends no such header.
        statuses: one is drawn for each page of garbage.
        methods: only calls with these HTTP methods; empty for all.
        about: only calls whose path or body holds this text, such as a row's key.
        times: how many calls are hit at most, ``None`` for no limit.

    Raises:
        UsageError: a value is out of its range.
    """

    kind: Trouble
    share: float = 1.0
    arrives: bool | None = None
    delay_s: tuple[float, float] = (2.0, 20.0)
    retry_after_s: tuple[int, ...] = (0, 1, 3)
    statuses: tuple[int, ...] = (502, 504, 404, 200)
    methods: tuple[str, ...] = ()
    about: str = ""
    times: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in TROUBLES:
            raise UsageError(f"The trouble {self.kind!r} is unknown. Give one of {', '.join(TROUBLES)}.")
        if not 0 < self.share <= 1:
            raise UsageError(f"share={self.share:g} of the calls is out of range; give more than 0 and at most 1.")
        if self.kind == "outage" and (self.share, self.methods, self.about, self.times) != (1.0, (), "", None):
            raise UsageError("An outage hits every call: leave out share, methods, about and times, or take 'reset'.")

    def concerns(self, method: str, text: str) -> bool:
        """Return whether a call with this method, and this path and body, may be hit."""
        return (not self.methods or method in self.methods) and self.about in text


@dataclass(frozen=True)
class Fate:
    """What happens to one call.

    Args:
        source: the disturbance that it was drawn from.
        kind: never ``any``.
        arrives: see :class:`Disturbance`.
        delay_s: of ``slow``.
        retry_after_s: of ``throttle``, 0 for no such header.
        status: of ``garbage``.
    """

    source: Disturbance
    kind: Trouble
    arrives: bool
    delay_s: float = 0.0
    retry_after_s: int = 0
    status: int = 502


def draw(disturbances: Sequence[Disturbance], seed: str) -> Fate | None:
    """Return what the first disturbance that hits does to a call, ``None`` where none hits it.

    Args:
        disturbances: those that concern the call.
        seed: of this call; the same seed and disturbances draw the same fate.
    """
    rng = random.Random(seed)
    for disturbance in disturbances:
        if rng.random() >= disturbance.share:
            continue
        kind = rng.choice(_OF_CALLS) if disturbance.kind == "any" else disturbance.kind
        arrives = rng.random() < 0.5 if disturbance.arrives is None else disturbance.arrives  # noqa: PLR2004
        return Fate(
            disturbance,
            kind,
            arrives=kind == "half" or (arrives and kind not in ("throttle", "outage")),
            delay_s=rng.uniform(*disturbance.delay_s) if kind == "slow" else 0.0,
            retry_after_s=rng.choice(disturbance.retry_after_s) if kind == "throttle" else 0,
            status=rng.choice(disturbance.statuses),
        )
    return None
