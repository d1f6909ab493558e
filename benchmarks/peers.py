"""The peers: torchrun with its c10d backend, and torchrun with its whole state in one table row.

``python benchmarks/peers.py <torchrun's options>`` is torchrun with the additional backend ``one-row``, and without the
plugin that this library registers, whose imports would slow the peers down.

``one-row`` is the straightforward implementation of torch's dynamic rendezvous on a table: the whole state is one value
in one row, which every node replaces by compare-and-swap. It uses torch's own state machine, conditional writes by
ETag, the vendor's SDK directly, and for the keys that the agents exchange the same external store as c10d.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from typing import Any

if __name__ == "__main__":
    sys.modules["azureml_elastic.node.rendezvous.torchrun"] = None  # type: ignore[assignment]  # torch logs that and goes on

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

__all__ = ["CONNECTION_VARIABLE", "ONE_ROW", "TABLE", "OneRowBackend"]

ONE_ROW = "one-row"
TABLE = "onerow"
CONNECTION_VARIABLE = "BENCH_CONNECTION_STRING"

_STORE_TIMEOUT = timedelta(seconds=60)


class OneRowBackend(RendezvousBackend):
    """Backend with the state of the rendezvous in one row, which is replaced by compare-and-swap.

    Args:
        connection_string: connection string of the account.
        run_id: key of the row.
    """

    def __init__(self, connection_string: str, run_id: str) -> None:
        from azure.core.exceptions import ResourceExistsError
        from azure.data.tables import TableClient

        self._run_id = run_id
        self._client = TableClient.from_connection_string(connection_string, TABLE)
        with contextlib.suppress(ResourceExistsError):
            self._client.create_table()

    @property
    def name(self) -> str:
        return ONE_ROW

    def get_state(self) -> tuple[bytes, Any] | None:
        from azure.core.exceptions import AzureError, ResourceNotFoundError

        try:
            entity = self._client.get_entity("rendezvous", self._run_id)
        except ResourceNotFoundError:
            return None
        except AzureError as error:
            raise RendezvousConnectionError(f"The row cannot be read: {error}") from error
        return entity["state"], entity.metadata["etag"]

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        from azure.core import MatchConditions
        from azure.core.exceptions import (
            AzureError,
            ResourceExistsError,
            ResourceModifiedError,
            ResourceNotFoundError,
        )
        from azure.data.tables import UpdateMode

        entity = {"PartitionKey": "rendezvous", "RowKey": self._run_id, "state": state}
        try:
            if token is None:
                written = self._client.create_entity(entity)
            else:
                unchanged = MatchConditions.IfNotModified
                written = self._client.update_entity(entity, UpdateMode.REPLACE, etag=token, match_condition=unchanged)
        except (ResourceExistsError, ResourceModifiedError, ResourceNotFoundError):
            current = self.get_state()
            return None if current is None else (*current, False)
        except AzureError as error:
            raise RendezvousConnectionError(f"The row cannot be written: {error}") from error
        return state, written["etag"], True


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    host, port = parameters.endpoint.rsplit(":", 1)
    store = TCPStore(host, int(port), is_master=False, timeout=_STORE_TIMEOUT)
    return create_handler(store, OneRowBackend(os.environ[CONNECTION_VARIABLE], parameters.run_id), parameters)


def main() -> None:
    from torch.distributed.run import main as torchrun

    rendezvous_handler_registry.register(ONE_ROW, _create)
    torchrun(sys.argv[1:])


if __name__ == "__main__":
    main()
