"""Publishes to MLflow: the only module that imports it.

Each value of a name and step is logged once, also if another node has logged it before, or the step is trained again:
the furthest step of each name is read from MLflow whenever this node becomes that of rank 0, after a failed call, of
which it is unknown what it has logged, and for values that have waited, as on a frozen node that another one replaces.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote

from azureml_elastic.config import Plan
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.node.agent.worker_group import tracked_run_variables
from azureml_elastic.node.publishing.translation import Update, Value

_LOG = logging.getLogger(__name__)

RUN_TAG = "azureml_elastic.run"
"""Tag by which the nodes of a run find their MLflow run."""

_MOST_METRICS = 200
"""Metrics of one call; MLflow's limit is 1,000, and Azure ML's 250."""

_LATE_SECONDS = 10.0
"""Age of a value from which another node may have logged its step."""

_REJECTED = frozenset({400, 413, 422})
"""HTTP states of requests that will never be accepted."""


@dataclass(frozen=True)
class MlflowTarget:
    """Place of a run in MLflow.

    Args:
        run_id: identifier of an existing MLflow run; ``None`` for one that the nodes of the run share and make.
        experiment_id: identifier of the experiment of that run; ``None`` to find it by its name.
        experiment_name: name of the experiment; ``None`` for MLflow's default.
    """

    tracking_uri: str
    run_id: str | None
    experiment_id: str | None
    experiment_name: str | None
    name: str


def mlflow_target(plan: Plan, name: str, environment: NodeEnvironment) -> MlflowTarget | None:
    """Return where to publish, ``None`` where MLflow is switched off, not configured or not installed."""
    uri = environment.mlflow_uri
    if not plan.metrics.mlflow or not uri or find_spec("mlflow") is None:
        return None
    environment = environment.with_variables(tracked_run_variables(plan, environment))
    return MlflowTarget(
        uri, environment.mlflow_run, environment.mlflow_experiment_id, environment.mlflow_experiment, name
    )


class MlflowPublisher:
    """Logs values and tags to one run of MLflow."""

    def __init__(self, target: MlflowTarget, clock: Callable[[], float] = time.time) -> None:
        from mlflow import MlflowClient

        self._target = target
        self._clock = clock
        self._client: Any = MlflowClient(tracking_uri=target.tracking_uri)
        self._run: str | None = None
        self._logged: frozenset[str] | None = None
        """Names of the metrics that MLflow has, ``None`` until they are read."""
        self._marks: dict[str, int] = {}
        """Furthest step of each name that MLflow has."""
        self._warned = False

    def publish(self, updates: Sequence[Update]) -> None:
        """See :class:`~azureml_elastic.node.publishing.translation.Publisher`."""
        late = self._clock() - _LATE_SECONDS
        # Another node may have logged since: as rank 0 before this one, or in its place while this one was frozen.
        if any(update.took_over or any(each.time < late for each in update.values) for update in updates):
            self._logged = None
        try:
            self._publish(updates)
        except BaseException:
            self._logged = None
            raise

    def close(self) -> None:
        """Nothing is buffered."""

    def _publish(self, updates: Sequence[Update]) -> None:
        from mlflow.entities import Metric, RunTag

        if self._run is None:
            self._run = self._target.run_id or self._shared_run()
        values = self._fresh([value for update in updates for value in update.values])
        tags = {name: text for update in updates for name, text in update.tags.items()}
        for at in range(0, len(values), _MOST_METRICS):
            part = values[at : at + _MOST_METRICS]
            self._log([Metric(each.name, each.value, round(each.time * 1000), each.step) for each in part])
        if tags:
            self._log([RunTag(name, text) for name, text in tags.items()])
        ended = next((update.ended for update in reversed(updates) if update.ended is not None), None)
        if self._target.run_id is None and ended is not None:
            self._client.set_terminated(self._run, "FINISHED" if ended else "FAILED")

    def _log(self, entries: list[Any]) -> None:
        """Log metrics or tags; of a batch that is rejected, the names that are rejected by themselves are dropped.

        Raises:
            Exception: the batch may be accepted later.
        """
        from mlflow.entities import Metric
        from mlflow.exceptions import MlflowException

        metrics = [each for each in entries if isinstance(each, Metric)]
        try:
            self._client.log_batch(self._run, metrics=metrics, tags=[] if metrics else entries)
        except MlflowException as error:
            if error.get_http_status_code() not in _REJECTED:
                raise
            names = list(dict.fromkeys(each.key for each in entries))
            if len(names) > 1:
                for name in names:  # one bad value has the whole batch rejected
                    self._log([each for each in entries if each.key == name])
            elif not self._warned:
                self._warned = True
                _LOG.warning("MLflow rejects %r, which is dropped, and perhaps others: %s", names[0], error)

    def _fresh(self, values: Sequence[Value]) -> list[Value]:
        """Return the values that MLflow does not have yet, and count them as logged."""
        fresh = []
        if self._logged is None:
            self._logged = frozenset(self._client.get_run(self._run).data.metrics)
            self._marks = {}
        for each in values:
            if each.name not in self._marks:
                self._marks[each.name] = self._furthest(each.name) if each.name in self._logged else -1
            if each.step > self._marks[each.name]:
                self._marks[each.name] = each.step
                fresh.append(each)
        return fresh

    def _furthest(self, name: str) -> int:
        return max((metric.step for metric in self._client.get_metric_history(self._run, name)), default=-1)

    def _shared_run(self) -> str:
        """Return the run that all nodes log to; the first one to look for it makes it."""
        experiment = self._experiment()
        tag = quote(self._target.name, safe="")
        found = self._client.search_runs(
            [experiment], f"tags.`{RUN_TAG}` = '{tag}'", max_results=1, order_by=["attributes.start_time ASC"]
        )
        if found:
            if found[0].info.status != "RUNNING":  # a node has left with an error, and others go on
                self._client.update_run(found[0].info.run_id, status="RUNNING")
            return str(found[0].info.run_id)
        made = self._client.create_run(experiment, run_name=self._target.name, tags={RUN_TAG: tag})
        return str(made.info.run_id)

    def _experiment(self) -> str:
        from mlflow.exceptions import MlflowException

        name = self._target.experiment_name
        if self._target.experiment_id is not None or name is None:
            return self._target.experiment_id or "0"
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another program has made it meanwhile
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)
