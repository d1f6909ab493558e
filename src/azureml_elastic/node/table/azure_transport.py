"""Transport that accepts only answers of the table service.

Gateways, proxies and firewalls between a node and its table answer with pages of their own. The SDK reads such a page
with status 404 as a missing row, and one with 200 as a permanent error, on which the node would leave its round.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from azureml_elastic.errors import MissingExtra

try:
    from azure.core.exceptions import HttpResponseError, ServiceResponseError
    from azure.core.pipeline.transport import RequestsTransport
except ImportError as missing:
    raise MissingExtra("azure-data-tables", "node") from missing

_DOCUMENTS = ("application/json", "application/xml", "application/atom+xml")


class Transport(RequestsTransport):  # type: ignore[misc] # untyped here
    """Transport that raises the retryable ``ServiceResponseError`` for torn or foreign answers.

    Args:
        connections: number of connections kept open; further threads open one per call.
    """

    def __init__(self, connections: int) -> None:
        super().__init__()
        self.open()
        for scheme in ("https://", "http://"):
            self.session.get_adapter(scheme).init_poolmanager(connections=2, maxsize=connections)

    def send(self, request: Any, **options: Any) -> Any:
        """Send a request and return the service's answer."""
        try:
            response = super().send(request, **options)
        except HttpResponseError as error:
            # The connection broke within the body; callers of the SDK expect an HttpResponseError to have a response.
            raise ServiceResponseError(str(error), error=error) from error
        kind = str(response.headers.get("Content-Type") or "")
        named = any(name.lower().startswith("x-ms-") for name in response.headers)
        if not named and not kind.startswith(_DOCUMENTS) and response.status_code != HTTPStatus.NO_CONTENT:
            raise ServiceResponseError(
                f"a page of {kind or 'no type'} with HTTP {response.status_code}, which is not the table's: something "
                "stands in between, such as a gateway, a proxy or a firewall"
            )
        return response
