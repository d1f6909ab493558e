"""Exports the run's own metrics and its spans by OpenTelemetry: the only module that imports it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import MissingExtra
from azureml_elastic.ledger.metric_names import OWN_PREFIX
from azureml_elastic.node.publishing.translation import Span, Update

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricReader
    from opentelemetry.sdk.trace import SpanProcessor

_SCOPE = "azureml_elastic"
_NANOSECONDS = 1_000_000_000


def open_otlp(run: str, node: str, environment: NodeEnvironment) -> OpenTelemetryPublisher:
    """Return a publisher that sends to the OTLP receiver which OpenTelemetry's variables describe.

    Raises:
        MissingExtra: the SDK or its exporter is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise MissingExtra("opentelemetry", "opentelemetry") from error
    attributes = {"azureml_elastic.run": run, "azureml_elastic.node": node}
    if not environment.names_opentelemetry_service:
        attributes["service.name"] = _SCOPE
    return OpenTelemetryPublisher(
        attributes, PeriodicExportingMetricReader(OTLPMetricExporter()), BatchSpanProcessor(OTLPSpanExporter())
    )


class OpenTelemetryPublisher:
    """Keeps gauges and counters up to date, and ends spans with the times of the events."""

    def __init__(self, attributes: Mapping[str, str], reader: MetricReader, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create(dict(attributes))
        # The thread that publishes closes both, for a bounded time; at exit they would wait for the receiver.
        self._metrics = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._traces = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._traces.add_span_processor(processor)
        meter = self._metrics.get_meter(_SCOPE)
        self._tracer = self._traces.get_tracer(_SCOPE)
        self._gauges = {
            "world_size": meter.create_gauge("azureml_elastic.world_size", "{worker}", "Workers of the round."),
            "goodput": meter.create_gauge("azureml_elastic.goodput", "1", "Share of the time that was kept training."),
            "step_seconds": meter.create_gauge("azureml_elastic.step.duration", "s", "Mean duration of recent steps."),
        }
        self._restarts = meter.create_counter("azureml_elastic.restarts", "{round}", "Rounds before the present one.")
        self._pause = meter.create_counter("azureml_elastic.checkpoint.pause", "s", "Training pauses for checkpoints.")
        self._restarted = 0
        self._round: Any = None

    def publish(self, updates: Sequence[Update]) -> None:
        """See :class:`~azureml_elastic.node.publishing.translation.Publisher`."""
        for update in updates:
            for each in update.values:
                if each.name.startswith(OWN_PREFIX):
                    self._measure(each.name.removeprefix(OWN_PREFIX), each.value)
            for span in update.spans:
                self._trace(span)

    def close(self) -> None:
        """Export what is left."""
        self._traces.shutdown()
        self._metrics.shutdown()

    def _measure(self, name: str, value: float) -> None:
        if name in self._gauges:
            self._gauges[name].set(value)
        elif name == "restarts":
            self._restarts.add(max(0, int(value) - self._restarted))
            self._restarted = max(self._restarted, int(value))
        elif name == "checkpoint_pause_seconds":
            self._pause.add(value)

    def _trace(self, span: Span) -> None:
        """Begin a round's span, or end a span; saves and restores belong to the round that is open."""
        from opentelemetry.trace import set_span_in_context

        if span.name != "round":
            context = None if self._round is None else set_span_in_context(self._round)
            self._begin(span, context).end(_nanoseconds(span.ended))
        elif span.ended is None:
            self._round = self._begin(span, None)
        else:
            (self._round or self._begin(span, None)).end(_nanoseconds(span.ended))
            self._round = None

    def _begin(self, span: Span, context: Any) -> Any:
        attributes = {f"azureml_elastic.{name}": value for name, value in span.attributes.items()}
        return self._tracer.start_span(
            f"azureml_elastic.{span.name}", context, attributes=attributes, start_time=_nanoseconds(span.started)
        )


def _nanoseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * _NANOSECONDS)
