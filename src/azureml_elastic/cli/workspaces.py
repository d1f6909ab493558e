"""Selection of the workspace by options, environment variables, or the ``config.json`` of the SDK."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from azureml_elastic.errors import UsageError

__all__ = ["GroupOption", "SubscriptionOption", "WorkspaceName", "WorkspaceOption", "find_workspace"]

SubscriptionOption = Annotated[
    str | None, typer.Option("--subscription", help="Id of the subscription; else from config.json.")
]
GroupOption = Annotated[
    str | None, typer.Option("--resource-group", "-g", help="The resource group; else from config.json.")
]
WorkspaceOption = Annotated[
    str | None, typer.Option("--workspace", "-w", help="Name of the workspace; else from config.json.")
]

_FOLDERS = (".azureml", "aml_config", "")
_FILE = "config.json"
_OPTIONS = {
    "subscription_id": "--subscription",
    "resource_group": "--resource-group",
    "workspace_name": "--workspace",
}
_SHORTEST_SCOPE = 9


@dataclass(frozen=True)
class WorkspaceName:
    """Identification of a workspace: id of the subscription, name of the resource group, and its own name."""

    subscription: str
    group: str
    name: str

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables that identify the workspace in its jobs."""
        return {
            "AZUREML_ARM_SUBSCRIPTION": self.subscription,
            "AZUREML_ARM_RESOURCEGROUP": self.group,
            "AZUREML_ARM_WORKSPACE_NAME": self.name,
        }


def find_workspace(
    subscription: str | None = None,
    group: str | None = None,
    workspace: str | None = None,
    *,
    start: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> WorkspaceName:
    """Return the workspace given by options, environment variables or ``config.json``, in this order of precedence.

    As in ``MLClient.from_config()``, the file is searched in ``.azureml``, ``aml_config`` and the folder itself, then
    in the parent folders.

    Raises:
        UsageError: a part of the identification is missing, or the file cannot be read.
    """
    given = {
        "subscription_id": subscription or environ.get("AZUREML_ARM_SUBSCRIPTION"),
        "resource_group": group or environ.get("AZUREML_ARM_RESOURCEGROUP"),
        "workspace_name": workspace or environ.get("AZUREML_ARM_WORKSPACE_NAME"),
    }
    missing = [name for name, value in given.items() if not value]
    if missing:
        path = _find_file((start or Path.cwd()).absolute())
        if path is None:
            options = ", ".join(_OPTIONS[name] for name in missing)
            raise UsageError(
                f"Nothing names the workspace: there is no {_FILE} in {start or Path.cwd()} or above. Download it from "
                f"the studio (workspace menu, 'Download config file'), or give {options}."
            )
        found = _read(path)
        given |= {name: found.get(name) for name in missing}
    still = [name for name, value in given.items() if not value]
    if still:
        raise UsageError(f"{path} has no {still[0]!r}. It holds subscription_id, resource_group and workspace_name.")
    return WorkspaceName(*(str(value) for value in given.values()))


def _find_file(start: Path) -> Path | None:
    paths = (folder / inner / _FILE for folder in (start, *start.parents) for inner in _FOLDERS)
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path) -> dict[str, str]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}). Download it again from the studio.") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds a {type(document).__name__}, not an object. Download it again from the studio.")
    pieces = str(document.get("Scope") or "").split("/")
    if len(pieces) >= _SHORTEST_SCOPE:  # as older tools wrote it
        return {"subscription_id": pieces[2], "resource_group": pieces[4], "workspace_name": pieces[8]}
    return document
