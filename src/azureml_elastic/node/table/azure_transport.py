"""The way to the service: its answers, and nobody else's.

Between a node and its table stand gateways, proxies and firewalls, which answer with pages of their own. To the SDK a
page with the status 404 is a row that does not exist, and one with 200 is an error that no repetition helps; a node
that believed it would leave its round. Only an answer that looks like the service's own is passed on.
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

__all__ = ["Transport"]

_DOCUMENTS = ("application/json", "application/xml", "application/atom+xml")


class Transport(RequestsTransport):  # type: ignore[misc] # untyped here
    """Raises ``ServiceResponseError``, which may be repeated, where the answer is torn or is not the service's.

    Args:
        connections: kept open; threads beyond that make one for each call.
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
            # The connection broke within the answer's body. The SDK's callers expect such an error to have an answer.
            raise ServiceResponseError(str(error), error=error) from error
        kind = str(response.headers.get("Content-Type") or "")
        named = any(name.lower().startswith("x-ms-") for name in response.headers)
        if not named and not kind.startswith(_DOCUMENTS) and response.status_code != HTTPStatus.NO_CONTENT:
            raise ServiceResponseError(
                f"a page of {kind or 'no type'} with HTTP {response.status_code}, which is not the table's: something "
                "stands in between, such as a gateway, a proxy or a firewall"
            )
        return response
