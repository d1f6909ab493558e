"""The variables from which Azure's packages read the credential of a storage account, in any kind of process."""

from __future__ import annotations

from dataclasses import dataclass

from azureml_elastic.environment import names
from azureml_elastic.environment.process import Environment

__all__ = ["StorageEnvironment"]


@dataclass(frozen=True)
class StorageEnvironment(Environment):
    """The credential of a storage account in the environment, which adlfs reads by itself."""

    @property
    def has_credential(self) -> bool:
        """Whether there is a connection string, a key or a signature, so that no identity is needed."""
        return any(
            self.get(name)
            for name in (
                names.AZURE_STORAGE_CONNECTION_STRING,
                names.AZURE_STORAGE_ACCOUNT_KEY,
                names.AZURE_STORAGE_SAS_TOKEN,
            )
        )
