"""Connection to a workspace with the user's credentials, and readable errors."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from azureml_elastic.errors import SubmitError, needs_extra

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_DETAIL = re.compile(r"^Details:\s*^\(x\) (.*)$", re.MULTILINE)
_ABOUT_ITSELF = ("_utils._experimental", "_schema.core.fields")


def connect(subscription: str, group: str, workspace: str) -> MLClient:
    """Return a client of a workspace, without sending a request."""
    with needs_extra("azure-ai-ml", "submit"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing azure-ai-ml uses deprecated features of marshmallow
        from azure.ai.ml import MLClient
        from azure.identity import DefaultAzureCredential
    logging.getLogger("azure.ai.ml").setLevel(logging.CRITICAL)  # which its import has set to INFO
    progress = sys.stderr.isatty()  # bars that are drawn again and again, with the escape codes of a terminal
    credential = DefaultAzureCredential()
    return MLClient(credential, subscription, group, workspace, enable_telemetry=False, show_progress=progress)


def silence_sdk_logs() -> None:
    """Suppress what Azure's packages log about failed logins, and about their own classes and fields."""
    # Loggers of modules: the import of azure-ai-ml sets the level of its package's.
    for name in ("azure.identity", *(f"azure.ai.ml.{each}" for each in _ABOUT_ITSELF), "msrest.serialization"):
        logging.getLogger(name).setLevel(logging.ERROR)


@contextlib.contextmanager
def readable_errors(action: str) -> Iterator[None]:
    """Turn errors of Azure's packages into a ``SubmitError`` of one sentence.

    Args:
        action: description of the attempted action, such as ``"submit the job"``.

    Raises:
        SubmitError: one of Azure's packages has raised an error.
    """
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import AzureError, ClientAuthenticationError

    try:
        yield
    except ClientAuthenticationError as error:
        raise SubmitError(
            f"Azure could not {action}: no credential was accepted. Run 'az login', or set the environment variables "
            f"of a service principal. {first_line(error)}"
        ) from error
    except (AzureError, MlException) as error:
        raise SubmitError(f"Azure could not {action}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """Return what an error's message says in its first line, or the name of the error's type.

    azure-ai-ml's message of a failed validation is a JSON object with a list of errors; others have colours, and what
    was wrong behind the word "Details".
    """
    text = _COLOUR.sub("", str(error)).strip()
    with contextlib.suppress(ValueError, KeyError, TypeError):
        found = [
            (str(each["message"]).strip().partition("\n")[0], each.get("path")) for each in json.loads(text)["errors"]
        ]
        if found:
            return "; ".join(f"{path}: {message}" if path else message for message, path in found)
    detail = _DETAIL.search(text)
    return (detail[1] if detail else text.partition("\n")[0]).strip() or type(error).__name__
