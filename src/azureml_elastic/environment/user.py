"""The environment of the user's machine: of the command line, of a submission and of the nodes that run on it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from azureml_elastic.environment import names
from azureml_elastic.environment.process import Environment

__all__ = ["UserEnvironment"]


@dataclass(frozen=True)
class UserEnvironment(Environment):
    """The environment in which a user has started a command or a script."""

    @property
    def shell(self) -> str:
        """The user's shell."""
        return self.get(names.SHELL) or "/bin/sh"

    @property
    def path(self) -> str | None:
        """The folders of commands, ``None`` where they are not set."""
        return self.get(names.PATH)

    @property
    def cache(self) -> Path:
        """This library's folder in the user's cache."""
        if base := self.get(names.XDG_CACHE_HOME):
            return Path(base) / "azureml-elastic"
        if sys.platform == "win32" and (local := self.get(names.LOCALAPPDATA)):
            return Path(local) / "azureml-elastic" / "Cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "azureml-elastic"
        return Path.home() / ".cache" / "azureml-elastic"

    @property
    def connection_string(self) -> str | None:
        """Connection string of a storage account, ``None`` without one."""
        return self.get(names.AZURE_STORAGE_CONNECTION_STRING)

    @property
    def certificates(self) -> Path | None:
        """The user's file of trusted certificates, ``None`` where there is none."""
        given = Path(self.get(names.REQUESTS_CA_BUNDLE) or ".")
        return given if given.is_file() else None

    @property
    def subscription(self) -> str | None:
        """Subscription of the job or shell whose environment this is."""
        return self.get(names.AZUREML_ARM_SUBSCRIPTION)

    @property
    def resource_group(self) -> str | None:
        """Resource group of the job or shell whose environment this is."""
        return self.get(names.AZUREML_ARM_RESOURCEGROUP)

    @property
    def workspace(self) -> str | None:
        """Workspace of the job or shell whose environment this is."""
        return self.get(names.AZUREML_ARM_WORKSPACE_NAME)

    @property
    def az_folder(self) -> Path:
        """Folder of the settings of ``az``."""
        return Path(self.get(names.AZURE_CONFIG_DIR) or Path.home() / ".azure")

    @property
    def az_resource_group(self) -> str | None:
        """Resource group that ``az`` takes by default."""
        return self.get(names.AZURE_DEFAULTS_GROUP)

    @property
    def az_workspace(self) -> str | None:
        """Workspace that ``az`` takes by default."""
        return self.get(names.AZURE_DEFAULTS_WORKSPACE)

    def for_nodes(self) -> dict[str, str]:
        """Return what all nodes on this machine get; one thread each unless the user says more, as they share cores."""
        return {"OMP_NUM_THREADS": "1", **self.variables, "PYTHONUNBUFFERED": "1"}
