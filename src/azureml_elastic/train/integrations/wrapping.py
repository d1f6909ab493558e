"""How integrations take the place of functions of their stacks.

The ``attachment`` of an integration has a table, ``WRAPPERS``, of all functions of its stack that it wraps, by module:
the integration depends on their names, and on when the stack calls them. With a release of the stack that lacks one,
the script fails when it imports that module, and not in the middle of its training.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

Wrapped = Callable[..., Any]

Wrappers = Mapping[str, Mapping[str, Wrapped]]


def wrap(module: ModuleType, wrappers: Wrappers) -> None:
    """Wrap functions of a stack's module, which its script has just imported, as a table says by the module's name."""
    for name, wrapper in next(found for end, found in wrappers.items() if module.__name__.endswith(end)).items():
        wrap_function_wrapper(module, name, wrapper)


def in_loop(method: str, loop_of: Callable[[Any], Any]) -> Wrapped:
    """Return a wrapper that calls a method of the training loop of an object of the stack, where it has one."""

    def wrapper(wrapped: Wrapped, instance: Any, args: Any, kwargs: Any) -> Any:
        loop = loop_of(instance)
        return wrapped(*args, **kwargs) if loop is None else getattr(loop, method)(wrapped, *args, **kwargs)

    return wrapper


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
