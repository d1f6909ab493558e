"""Lets a script that is started again log its parameters to the same MLflow run, although some have other values now.

MLflow refuses another value for a parameter that a run has. After a restart the world size, the rank's host, a process
id or a folder with a date are others, and the script would end each time it is started again. The first value stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from inspect import signature
from types import ModuleType
from typing import Any

from wrapt import wrap_function_wrapper

from azureml_elastic.environment.worker import WorkerEnvironment

_LOG = logging.getLogger(__name__)

_SHORTEST_CUT = 250
"""Least number of characters to which a store cuts a value."""

_LONGEST_SHOWN = 80


def attach_to_client(client: ModuleType) -> None:
    """Attach to the class in MLflow's module ``mlflow.tracking._tracking_service.client`` that all logging uses."""
    first = _FirstValues()
    wrap_function_wrapper(client, "TrackingServiceClient.log_param", first.log_param)
    wrap_function_wrapper(client, "TrackingServiceClient.log_batch", first.log_batch)


class _FirstValues:
    """The parameters that MLflow had of each run before this process logged any, in rounds after the first."""

    def __init__(self) -> None:
        self._held: dict[str, Mapping[str, str]] = {}
        self._said: set[str] = set()

    def log_param(self, log: Callable[..., Any], client: Any, arguments: tuple[Any, ...], options: Any) -> Any:
        """Log a parameter, with its first value if it has one."""
        call = signature(log).bind(*arguments, **options)
        given = call.arguments
        held, key = self._of(client, given["run_id"]), given["key"]
        if self._changed(held, {key: given["value"]}):
            given["value"] = held[key]
        return log(*call.args, **call.kwargs)

    def log_batch(self, log: Callable[..., Any], client: Any, arguments: tuple[Any, ...], options: Any) -> Any:
        """Log metrics, parameters and tags, the parameters with their first values if they have any."""
        call = signature(log).bind(*arguments, **options)
        if params := call.arguments.get("params"):
            held = self._of(client, call.arguments["run_id"])
            changed = self._changed(held, {each.key: each.value for each in params})
            kept = [type(each)(each.key, held[each.key]) if each.key in changed else each for each in params]
            call.arguments["params"] = kept
        return log(*call.args, **call.kwargs)

    def _of(self, client: Any, run_id: str) -> Mapping[str, str]:
        """Return the first values; none in the first round, where MLflow itself refuses changes."""
        if WorkerEnvironment.read().round <= 1:
            return {}
        if run_id not in self._held:
            try:
                self._held[run_id] = dict(client.get_run(run_id).data.params)
            except Exception as error:  # noqa: BLE001 - of any store; the script's own call says what is wrong
                _LOG.debug("The parameters of the MLflow run %s cannot be read: %s", run_id, error)
                return {}
        return self._held[run_id]

    def _changed(self, held: Mapping[str, str], given: Mapping[str, Any]) -> frozenset[str]:
        """Return the names of parameters that have another value than before, and say so once."""
        texts = {key: str(value) for key, value in given.items() if key in held}
        changed = {key: text for key, text in texts.items() if held[key] != text and not _is_cut(held[key], text)}
        new = sorted(changed.keys() - self._said)
        if new:
            self._said.update(new)
            _LOG.warning(
                "The script has started again, and MLflow keeps the first values of parameters that differ now: %s.",
                ", ".join(f"{key} {_shown(held[key])} (now {_shown(changed[key])})" for key in new),
            )
        return frozenset(changed)


def _is_cut(held: str, text: str) -> bool:
    return len(held) >= _SHORTEST_CUT and text.startswith(held)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}...")
