"""A node whose agent, after SIGUSR1, gets an unexpected error in one of its next calls; the rest is the real one."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import azureml_elastic.node
from azureml_elastic.environment import names as variables
from azureml_elastic.forks.server import EarlierImports
from tests.support.leaving import become_node

SEED = "TEST_DYING_SEED"
MOST_CALLS = 300
AGAIN_S = 0.1

_ROOT = os.path.dirname(azureml_elastic.node.__file__)  # noqa: PTH120


class UnexpectedError(Exception):
    """What no line of the agent expects."""


def become_dying_node(request: Mapping[str, Any], descriptors: list[int], made: EarlierImports) -> Callable[[], Any]:
    """Become a node; see :func:`tests.support.leaving.become_node`."""
    run = become_node(request, descriptors, made)

    def armed() -> Any:
        draw = random.Random(f"{os.environ.get(SEED)}/{os.environ[variables.NODE_ID]}")
        for number in (signal.SIGUSR1, signal.SIGALRM):
            signal.signal(number, lambda _, frame: _fail_in_a_call(draw, frame))
        try:
            return run()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm ends a process that has given up its handlers

    return armed


def _fail_in_a_call(draw: random.Random, where: FrameType | None) -> None:
    """Raise in one of the next calls of the agent's loop; again later, as some errors are meant to be survived."""
    if not _in_loop(where):
        return  # it dies
    left = draw.randrange(1, MOST_CALLS)

    def on_call(frame: FrameType, event: str, _: Any) -> None:
        nonlocal left
        if event != "call" or not frame.f_code.co_filename.startswith(_ROOT):
            return
        left -= 1
        if left <= 0:
            sys.setprofile(None)
            if _in_loop(frame):
                print(f"An unexpected error in {frame.f_code.co_qualname}.", file=sys.stderr, flush=True)
                raise UnexpectedError(frame.f_code.co_qualname)

    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    sys.setprofile(on_call)


def _in_loop(frame: FrameType | None) -> bool:
    names = set()
    while frame is not None:
        names.add(frame.f_code.co_name)
        frame = frame.f_back
    return "take_part" in names and "_end_workers" not in names
