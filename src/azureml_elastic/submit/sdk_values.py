"""New objects of azure-ai-ml from the values of a job's fields: inputs, outputs, environment, identity.

Azure-ai-ml takes any text as a type or mode and reports it when the job is sent, if at all; dictionaries with a wrong
field end in errors of Python. Here each of these is one sentence with the name of the field.
"""

from __future__ import annotations

import copy
import difflib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from azureml_elastic.config.frozen import is_fields
from azureml_elastic.config.presets import Presets, mode_of_input
from azureml_elastic.errors import SubmitError, needs_extra
from azureml_elastic.submit.bindings import LITERALS, Bound
from azureml_elastic.submit.client import first_line
from azureml_elastic.submit.local_files import checked_data, without_scheme

with needs_extra("azure-ai-ml", "submit"):
    from azure.ai.ml import Input, Output
    from azure.ai.ml.constants import AssetTypes, InputOutputModes
    from azure.ai.ml.entities import (
        AmlTokenConfiguration,
        Environment,
        ManagedIdentityConfiguration,
        UserIdentityConfiguration,
    )
    from azure.ai.ml.exceptions import MlException
    from marshmallow.exceptions import ValidationError as SchemaError

_TYPES_OF_LITERALS = frozenset(LITERALS.values())
_AN_ENVIRONMENT = (
    "Give a name, as in 'azureml:my-environment@latest', or Environment(image=...) from azure.ai.ml.entities."
)
_WITHOUT_VERSION = re.compile(r"(?:azureml:)?([\w.-]+)[:@]?", re.ASCII)
_IDENTITIES: Mapping[str, type] = {
    "aml_token": AmlTokenConfiguration,
    "managed": ManagedIdentityConfiguration,
    "managed_identity": ManagedIdentityConfiguration,
    "user_identity": UserIdentityConfiguration,
}


def made_environment(environment: Any) -> str | Environment:
    """Return an environment as azure-ai-ml takes it: a name, or a new ``Environment``."""
    if isinstance(environment, str):
        if not environment.removeprefix("azureml:").strip():
            raise SubmitError(f"environment={environment!r} is empty. {_AN_ENVIRONMENT}")
        if name := _WITHOUT_VERSION.fullmatch(environment):
            raise SubmitError(
                f"environment={environment!r} has no version. Give '{name[1]}@latest' for the newest one, or one as in "
                f"'{name[1]}:1'."
            )
        return without_scheme(environment)
    if is_fields(environment):
        if not any(environment.values()):
            raise SubmitError(f"environment={environment!r} is empty. {_AN_ENVIRONMENT}")
        environment = _made(Environment, environment, "environment")
    if not isinstance(environment, Environment):
        raise SubmitError(
            f"The environment is of the type {type(environment).__name__}. Give a name, as in "
            "'azureml:my-environment@latest', an Environment from azure.ai.ml.entities, or its fields."
        )
    return copy.deepcopy(environment)


def made_identity(identity: Any) -> Any:
    """Return a new object of an identity that was given as one, or by its fields; ``None`` for none."""
    if identity is None:
        return None
    if is_fields(identity):
        fields = dict(identity)
        kind = fields.pop("type", None)
        if kind not in _IDENTITIES:
            raise SubmitError(f"identity.type={kind!r} is {_none_of(kind, _IDENTITIES)}")
        return _made(_IDENTITIES[kind], fields, "identity")
    if not isinstance(identity, tuple(set(_IDENTITIES.values()))):
        raise SubmitError(
            f"The identity is of the type {type(identity).__name__}. Give UserIdentityConfiguration(), "
            "AmlTokenConfiguration() or ManagedIdentityConfiguration(client_id=...) from azure.ai.ml."
        )
    return copy.deepcopy(identity)


def made_input(name: str, value: Any, presets: Presets, *, unset: bool) -> Any:
    """Return an input of the job: a literal, or a new ``Input`` with a path and a mode.

    Args:
        presets: modes of inputs without one.
        unset: whether the input may have no value, and is a declaration then.
    """
    if type(value) in LITERALS:
        return value
    if is_fields(value):
        value = _made(Input, value, f"inputs.{name}")
    if isinstance(value, Bound):
        if not unset:
            raise _bound(name, value)
        value = Input(type=value.type or "string", mode=value.mode)
    if not isinstance(value, Input):
        raise SubmitError(
            f"The input {name!r} is of the type {type(value).__name__}. Give a number, a text, a truth value, or an "
            "Input from azure.ai.ml."
        )
    _check_type(f"The input {name!r}", value.type, {*_names_of(AssetTypes), *_TYPES_OF_LITERALS})
    given = value.default if value.type in _TYPES_OF_LITERALS else value.path
    if given is None and not unset:
        raise SubmitError(
            f"The input {name!r} of type {value.type!r} has no value. Give Input(type=..., path=...), or the bare "
            "value for a number or a text."
        )
    if value.type in _TYPES_OF_LITERALS:
        return Input(type=value.type) if given is None else given
    if given is not None:
        checked_data(name, given)
    _check_mode(f"The input {name!r}", value.mode)
    made = copy.deepcopy(value)
    if made.path is not None:
        made.path = without_scheme(str(made.path))
    if made.mode is None:
        made.mode = mode_of_input(presets.data, str(made.type))
    return made


def made_output(name: str, value: Any) -> Any:
    """Return a new output of the job; ``None`` for one of azure-ai-ml's defaults."""
    if value is None:
        return None
    if not is_fields(value) and not isinstance(value, Output):
        raise SubmitError(
            f"The output {name!r} is of the type {type(value).__name__}. Give an Output from azure.ai.ml, as in "
            "Output(type='uri_folder', path=...), or its fields."
        )
    made: Any = _made(Output, value, f"outputs.{name}") if is_fields(value) else value
    _check_type(f"The output {name!r}", made.type, set(_names_of(AssetTypes)))
    _check_mode(f"The output {name!r}", made.mode)
    return copy.deepcopy(made)


def _bound(name: str, value: Bound) -> SubmitError:
    if value.searched:
        return SubmitError(
            f"The input {name!r} is a search expression, which only a sweep has a value for. Submit a sweep of the "
            "job: job.sweep(primary_metric=..., goal=..., sampling_algorithm=...)."
        )
    return SubmitError(
        f"The input {name!r} is {value!r}, which only a step of that pipeline has a value for. Call the job in the "
        "@dsl.pipeline function, and submit the pipeline."
    )


def _made(kind: type, fields: Mapping[str, Any], path: str) -> Any:
    known = set(inspect.signature(kind).parameters)
    try:
        made = kind(**copy.deepcopy(dict(fields)))
    except (MlException, SchemaError, TypeError, ValueError) as error:
        _refuse_unknown(kind, sorted(fields.keys() - known), known, path)
        text = first_line(error).rstrip(".")
        raise SubmitError(f"{path} is not valid: {text}. Correct it, or leave it out.") from error
    # Its constructors swallow unknown keywords by **kwargs, but for those that they turn into attributes.
    _refuse_unknown(kind, [name for name in sorted(fields.keys() - known) if not hasattr(made, name)], known, path)
    return made


def _refuse_unknown(kind: type, names: Sequence[str], known: Iterable[str], path: str) -> None:
    if names:
        close = difflib.get_close_matches(str(names[0]), known, 1)
        near = f" Did you mean {close[0]!r}?" if close else " Leave it out."
        raise SubmitError(f"{path} has the field {names[0]!r}, which an {kind.__name__} does not have.{near}")


def _check_type(what: str, kind: object, names: set[str]) -> None:
    if kind not in names:
        raise SubmitError(f"{what} has type={kind!r}, which is {_none_of(kind, names)}")


def _check_mode(what: str, mode: object) -> None:
    names = set(_names_of(InputOutputModes))
    if mode is not None and mode not in names:
        raise SubmitError(f"{what} has mode={mode!r}, which is {_none_of(mode, names)}")


def _none_of(given: object, names: Mapping[str, Any] | set[str]) -> str:
    close = difflib.get_close_matches(str(given), names, 1)
    return f"none of {', '.join(sorted(names))}." + (f" Did you mean {close[0]!r}?" if close else " Give one of them.")


def _names_of(constants: type) -> Iterator[str]:
    """Yield the values of a class of azure-ai-ml's constants; a newer release may have more of them."""
    yield from (str(value) for name, value in vars(constants).items() if name.isupper())
