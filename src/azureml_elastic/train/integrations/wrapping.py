"""How integrations take the place of functions of their stacks.

The ``attachment`` of an integration has a table, ``WRAPPERS``, of all functions of its stack that it wraps, by module:
the integration depends on their names, and on when the stack calls them. With a release of the stack that lacks one,
the script fails when it imports that module, and not in the middle of its training.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from azureml_elastic.train.session.stack_session import stack_session

Wrapped = Callable[..., Any]

Wrappers = Mapping[str, Mapping[str, Wrapped]]


def attaching(
    wrappers: Wrappers, further: Mapping[str, Callable[[Any], None]] | None = None
) -> Callable[[ModuleType], None]:
    """Return a function that attaches an integration to a module of its stack, which the script has just imported.

    Args:
        wrappers: functions that are wrapped, by the end of their module's name
        further: what else is done to a module, by its name
    """

    def attach(module: ModuleType) -> None:
        for name, wrapper in next(found for end, found in wrappers.items() if module.__name__.endswith(end)).items():
            wrap_function_wrapper(module, name, wrapper)
        if further and module.__name__ in further:
            further[module.__name__](module)

    return attach


def in_session(wrapper: Callable[..., Any]) -> Wrapped:
    """Return a wrapper that gets the session before its other arguments, and is called only where there is one."""

    @functools.wraps(wrapper)
    def within(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        session = stack_session()
        return wrapped(*args, **kwargs) if session is None else wrapper(session, wrapped, instance, args, kwargs)

    return within


def first_of(reasons: Mapping[str | None, Any]) -> str | None:
    """Return the first reason that applies, ``None`` if none does."""
    return next((text for text, applies in reasons.items() if text is not None and applies), None)


def in_loop(method: str, loop_of: Callable[[Any], Any], *, with_instance: bool = False) -> Wrapped:
    """Return a wrapper that calls a method of the training loop of an object of the stack, where it has one."""

    def wrapper(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        loop = loop_of(instance)
        if loop is None:
            return wrapped(*args, **kwargs)
        return getattr(loop, method)(wrapped, *((instance,) if with_instance else ()), *args, **kwargs)

    return wrapper


@contextlib.contextmanager
def holds(variable: ContextVar[bool]) -> Iterator[None]:
    """Have a variable be true within the block."""
    token = variable.set(True)
    try:
        yield
    finally:
        variable.reset(token)


@contextlib.contextmanager
def replaced(instance: Any, methods: Mapping[str, Wrapped]) -> Iterator[None]:
    """Have functions called in place of an object's methods, with those as the first argument.

    They take the place of what the stack calls, whichever class or script has defined it last: a subclass's method that
    calls that of its parent is replaced once, and one that does not call it is replaced too.
    """
    before = {name: vars(instance).get(name) for name in methods}
    for name, method in methods.items():
        setattr(instance, name, functools.partial(method, getattr(instance, name)))
    try:
        yield
    finally:
        for name, own in before.items():
            if own is None:
                delattr(instance, name)
            else:
                setattr(instance, name, own)
