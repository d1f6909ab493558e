"""Selection of the workspace by options, environment variables, ``config.json``, or the defaults of ``az``."""

from __future__ import annotations

import configparser
import contextlib
import json
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

from azureml_elastic.environment.node import WORKSPACE
from azureml_elastic.environment.user import UserEnvironment
from azureml_elastic.errors import UsageError

_FOLDERS = (".azureml", "aml_config", "")
_FILE = "config.json"
_OPTIONS = {
    "subscription_id": "--subscription",
    "resource_group": "--resource-group",
    "workspace_name": "--workspace-name",
}
WORKSPACE_OPTIONS = (*_OPTIONS.values(), "-g", "-w")
"""The options of the root command that name the workspace, as those of ``az ml`` do."""

_SHORTEST_SCOPE = 9


@dataclass(frozen=True)
class WorkspaceOptions:
    """What the options of the root command say; ``None`` for what they leave out."""

    subscription: str | None = None
    group: str | None = None
    name: str | None = None


@dataclass(frozen=True)
class WorkspaceName:
    """Identification of a workspace: id of the subscription, name of the resource group, and its own name."""

    subscription: str
    group: str
    name: str

    @property
    def variables(self) -> Mapping[str, str]:
        """The environment variables that identify the workspace in its jobs."""
        return dict(zip(WORKSPACE, (self.subscription, self.group, self.name), strict=True))


_OPTIONS_IN_USE: ContextVar[WorkspaceOptions | None] = ContextVar("workspace options", default=None)


def current_workspace() -> WorkspaceName:
    """Return the workspace of the command that is running.

    Raises:
        UsageError: a part of the identification is missing, or a file cannot be read.
    """
    return find_workspace(_OPTIONS_IN_USE.get() or WorkspaceOptions())


def set_options(options: WorkspaceOptions) -> None:
    """Set what :func:`current_workspace` starts from; for the root command."""
    _OPTIONS_IN_USE.set(options)


def find_workspace(
    options: WorkspaceOptions, *, start: Path | None = None, environment: UserEnvironment | None = None
) -> WorkspaceName:
    """Return the workspace given by options, environment variables, ``config.json`` or ``az``, in this order.

    As in ``MLClient.from_config()``, the file is searched in ``.azureml``, ``aml_config`` and the folder itself, then
    in the parent folders. The defaults of ``az`` are those of ``az account set`` and ``az configure --defaults``.

    Raises:
        UsageError: a part of the identification is missing, or a file cannot be read.
    """
    environment = environment or UserEnvironment.read()
    given: dict[str, str | None] = {
        "subscription_id": options.subscription or environment.subscription,
        "resource_group": options.group or environment.resource_group,
        "workspace_name": options.name or environment.workspace,
    }
    path = None
    if not all(given.values()):
        path = _find_file((start or Path.cwd()).absolute())
        given = _completed(given, {} if path is None else _read(path))
    if not all(given.values()):
        given = _completed(given, _defaults_of_az(environment))
    missing = [name for name, value in given.items() if not value]
    if missing and path is not None:
        raise UsageError(f"{path} has no {missing[0]!r}. It holds subscription_id, resource_group and workspace_name.")
    if missing:
        left = ", ".join(_OPTIONS[name] for name in missing)
        raise UsageError(
            f"Nothing names the workspace: there is no {_FILE} in {start or Path.cwd()} or above. Download it from the "
            f"studio (workspace menu, 'Download config file'), set defaults by 'az configure --defaults group=... "
            f"workspace=...', or give {left} before the command."
        )
    return WorkspaceName(*(str(value) for value in given.values()))


def _completed(given: Mapping[str, str | None], more: Mapping[str, str | None]) -> dict[str, str | None]:
    return {name: value or more.get(name) for name, value in given.items()}


def _defaults_of_az(environment: UserEnvironment) -> dict[str, str | None]:
    """Return what the command line of Azure uses by default; its files are left alone where they cannot be read."""
    folder = environment.az_folder
    settings = configparser.ConfigParser(interpolation=None)
    subscriptions = []
    with contextlib.suppress(OSError, ValueError, configparser.Error):
        settings.read(folder / "config", encoding="utf-8")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        # az begins this file with a byte-order mark.
        profile = json.loads((folder / "azureProfile.json").read_text(encoding="utf-8-sig"))
        subscriptions = [each["id"] for each in profile.get("subscriptions") or () if each.get("isDefault")]
    return {
        "subscription_id": subscriptions[0] if subscriptions else None,
        "resource_group": environment.az_resource_group or settings.get("defaults", "group", fallback=None),
        "workspace_name": environment.az_workspace or settings.get("defaults", "workspace", fallback=None),
    }


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
