"""The environment of the user's machine: of the command line, of a submission and of the nodes that run on it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from azureml_elastic.environment import names
from azureml_elastic.environment.process import Environment, Variable


@dataclass(frozen=True)
class UserEnvironment(Environment):
    """The environment in which a user has started a command or a script."""

    @property
    def shell(self) -> str:
        """The user's shell."""
        return self.get("SHELL") or "/bin/sh"

    path = Variable("PATH")
    """The folders of commands, ``None`` where they are not set."""

    @property
    def cache(self) -> Path:
        """This library's folder in the user's cache."""
        if base := self.get("XDG_CACHE_HOME"):
            return Path(base) / "azureml-elastic"
        if sys.platform == "win32" and (local := self.get("LOCALAPPDATA")):
            return Path(local) / "azureml-elastic" / "Cache"
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "azureml-elastic"
        return Path.home() / ".cache" / "azureml-elastic"

    connection_string = Variable(names.AZURE_STORAGE_CONNECTION_STRING)
    """Connection string of a storage account, ``None`` without one."""

    @property
    def certificates(self) -> Path | None:
        """The user's file of trusted certificates, ``None`` where there is none."""
        given = Path(self.get("REQUESTS_CA_BUNDLE") or ".")
        return given if given.is_file() else None

    subscription = Variable("AZUREML_ARM_SUBSCRIPTION")
    """Subscription of the job or shell whose environment this is."""

    resource_group = Variable("AZUREML_ARM_RESOURCEGROUP")
    """Resource group of the job or shell whose environment this is."""

    workspace = Variable("AZUREML_ARM_WORKSPACE_NAME")
    """Workspace of the job or shell whose environment this is."""

    @property
    def az_folder(self) -> Path:
        """Folder of the settings of ``az``."""
        return Path(self.get("AZURE_CONFIG_DIR") or Path.home() / ".azure")

    az_resource_group = Variable("AZURE_DEFAULTS_GROUP")
    """Resource group that ``az`` takes by default."""

    az_workspace = Variable("AZURE_DEFAULTS_WORKSPACE")
    """Workspace that ``az`` takes by default."""

    def for_nodes(self) -> dict[str, str]:
        """Return what all nodes on this machine get; one thread each unless the user says more, as they share cores."""
        return {"OMP_NUM_THREADS": "1", **self.variables, "PYTHONUNBUFFERED": "1"}
