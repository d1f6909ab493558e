"""The environment of this process: the only place that reads or changes it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from string import Template
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self  # not at run time: processes of users' scripts import this module

_STORAGE_CREDENTIALS = ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN")


@dataclass(frozen=True)
class Environment:
    """Environment variables at one moment; the classes of each kind of process have typed properties of them."""

    variables: Mapping[str, str]

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Self:
        """Return a copy of variables, by default of those of this process."""
        return cls(MappingProxyType(dict(os.environ if variables is None else variables)))

    def get(self, name: str) -> str | None:
        """Return the value of a variable whose name is configured, ``None`` where it is not set."""
        return self.variables.get(name)

    @property
    def log_level(self) -> str | None:
        """Level of what is logged, by the variable that torchrun reads; ``None`` where it is not set."""
        return self.get("LOGLEVEL")

    @property
    def has_storage_credential(self) -> bool:
        """Whether there is a credential of a storage account, which adlfs reads by itself: no identity is needed."""
        return any(map(self.get, _STORAGE_CREDENTIALS))

    def expand(self, text: str) -> str:
        """Return a text with its ``$`` variables replaced; unknown ones stay."""
        return Template(text).safe_substitute(self.variables)

    def with_variables(self, variables: Mapping[str, str]) -> Self:
        """Return these variables with others set or replaced."""
        return type(self).read({**self.variables, **variables})

    def for_child(self, variables: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of a child process: these variables, with others set or replaced."""
        return {**self.variables, **(variables or {})}


class Variable:
    """One variable as a property of an :class:`Environment`; ``None`` where it is not set or empty."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, environment: Environment, _: object = None) -> str | None:
        return environment.get(self._name) or None


def change(variables: Mapping[str, str | None]) -> None:
    """Set variables of this process and of its later children; ``None`` removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set variables of this process that are not set: a user's own setting takes precedence."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def take(name: str) -> str | None:
    """Return the value of a variable and remove it, so that no child process inherits it."""
    return os.environ.pop(name, None)


@contextlib.contextmanager
def changed(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Change variables of this process as :func:`change` does, and restore them at the end of the context."""
    before = {name: os.environ.get(name) for name in variables}
    change(variables)
    try:
        yield
    finally:
        change(before)
