"""The client of azure-ai-ml for a workspace, with the user's own login."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING

from azureml_elastic.errors import MissingExtra, SubmitError

if TYPE_CHECKING:
    from azure.ai.ml import MLClient

__all__ = ["connect", "quietly", "said_plainly"]


def connect(subscription: str, group: str, workspace: str) -> MLClient:
    """Return a client; nothing is asked of the workspace yet.

    Args:
        subscription: id.
        group: the resource group.
        workspace: its name.

    Raises:
        MissingExtra: azure-ai-ml is not installed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what azure-ai-ml does with marshmallow while it is imported
            from azure.ai.ml import MLClient
            from azure.identity import DefaultAzureCredential
    except ModuleNotFoundError as error:
        raise MissingExtra("azure-ai-ml", "submit") from error
    quietly()
    return MLClient(DefaultAzureCredential(), subscription, group, workspace, enable_telemetry=False)


def quietly() -> None:
    """Silence what Azure's packages log about themselves: logins tried in vain, experimental classes, missing jobs."""
    logging.getLogger("azure.identity").setLevel(logging.ERROR)
    logging.getLogger("azure.ai.ml").setLevel(logging.CRITICAL)


@contextlib.contextmanager
def said_plainly(what: str) -> Iterator[None]:
    """Turn the errors of Azure's packages into one sentence.

    Args:
        what: was tried, as in ``"submit the job"``.

    Raises:
        SubmitError: a package of Azure's has raised something.
    """
    from azure.ai.ml.exceptions import MlException
    from azure.core.exceptions import AzureError, ClientAuthenticationError, ResourceNotFoundError

    try:
        yield
    except ClientAuthenticationError as error:
        raise SubmitError(
            f"Azure could not {what}: nobody is logged in here. Run 'az login', or set the variables of a service "
            f"principal. {_first_line(error)}"
        ) from error
    except ResourceNotFoundError as error:
        raise SubmitError(f"Azure could not {what}: {_first_line(error)}") from error
    except (AzureError, MlException) as error:
        raise SubmitError(f"Azure could not {what}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
