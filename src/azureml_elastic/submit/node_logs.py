"""Logs of the nodes' jobs, as Azure ML keeps them while a job runs and after its end."""

from __future__ import annotations

import re
from collections.abc import Mapping

from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.client import first_line

__all__ = ["leading_node", "read_log"]

_FOLDER = "user_logs/"
"""Folder of what the command prints; the other files are those of the service."""

_ENTERED = re.compile(r"Round (\d+): rank 0 of [\d,]+ nodes?\b")


def read_log(files: Mapping[str, str]) -> str:
    """Return what the command of a job has printed, empty if there is nothing yet.

    A job of several nodes has a file for each, which follow each other under their names.

    Args:
        files: addresses of the job's log files by name.

    Raises:
        SubmitError: a log cannot be read.
    """
    from azure.core import PipelineClient
    from azure.core.exceptions import AzureError
    from azure.core.rest import HttpRequest, HttpResponse

    texts: dict[str, str] = {}
    for name, url in sorted(files.items()):
        if name.startswith(_FOLDER):
            http: PipelineClient[HttpRequest, HttpResponse] = PipelineClient(base_url=url)
            try:
                with http, http.send_request(HttpRequest("GET", url)) as response:
                    response.raise_for_status()
                    texts[name.removeprefix(_FOLDER)] = response.text(encoding="utf-8")
            except AzureError as error:
                raise SubmitError(f"Azure could not give the log {name}: {first_line(error)}") from error
    several = len(texts) > 1
    return "\n".join(f"==> {name} <==\n{text}" if several else text for name, text in texts.items())


def leading_node(logs: Mapping[str, str]) -> str | None:
    """Return the node that was rank 0 in the last round, by what the nodes' agents have logged; ``None`` if unknown.

    Args:
        logs: text of each node's log.
    """
    rounds = {node: max(map(int, _ENTERED.findall(text)), default=0) for node, text in logs.items()}
    last = max(rounds.values(), default=0)
    return next((node for node, number in rounds.items() if number == last), None) if last else None
