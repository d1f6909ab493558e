"""Logs of the nodes' jobs, as Azure ML keeps them while a job runs and after its end."""

from __future__ import annotations

import re
from collections.abc import Mapping

from azureml_elastic.errors import SubmitError
from azureml_elastic.submit.client import first_line

__all__ = ["GrowingLog", "joined", "leading_node", "read_logs"]

_FOLDER = "user_logs/"
"""Folder of what the command prints; the other files are those of the service."""

_ENTERED = re.compile(r"Round (\d+): rank 0 of [\d,]+ nodes?\b")


def read_logs(files: Mapping[str, str]) -> dict[str, str]:
    """Return what the command of a job has printed, by file: a job of several nodes has one for each.

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
    return texts


def joined(texts: Mapping[str, str]) -> str:
    """Return the texts of a job's files in one; several follow each other under their names."""
    return "\n".join(_named(name, text, several=len(texts) > 1) for name, text in texts.items())


class GrowingLog:
    """What is added to the files of a job while it runs."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def added(self, texts: Mapping[str, str], *, last: bool) -> str:
        """Return what was added since the last call, in whole lines; of several files under their names.

        Args:
            texts: texts of the files by now.
            last: whether nothing will be added any more, so that a line without a line feed is returned, too.
        """
        parts = []
        for name, text in texts.items():
            fresh = text.removeprefix(self._known.get(name, ""))
            fresh = fresh if last else fresh[: fresh.rfind("\n") + 1]
            self._known[name] = self._known.get(name, "") + fresh
            if fresh:
                parts.append(_named(name, fresh, several=len(texts) > 1))
        return "".join(parts)


def _named(name: str, text: str, *, several: bool) -> str:
    return f"==> {name} <==\n{text}" if several else text


def leading_node(logs: Mapping[str, str]) -> str | None:
    """Return the node that was rank 0 in the last round, by what the nodes' agents have logged; ``None`` if unknown.

    Args:
        logs: text of each node's log.
    """
    rounds = {node: max(map(int, _ENTERED.findall(text)), default=0) for node, text in logs.items()}
    last = max(rounds.values(), default=0)
    return next((node for node, number in rounds.items() if number == last), None) if last else None
