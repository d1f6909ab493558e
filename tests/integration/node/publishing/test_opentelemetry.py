"""Metrics and spans through OpenTelemetry's SDK, in memory and to a receiver on this machine."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import pytest

from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.node.publishing.opentelemetry import OpenTelemetryPublisher, open_otlp
from azureml_elastic.node.publishing.translation import Span, Update, Value

pytestmark = pytest.mark.skipif(
    find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None,
    reason="opentelemetry is not installed",
)


def own(name, value, step=1):
    return Update((Value(f"elastic/{name}", step, value, 1000.0),))


UPDATES = [
    Update(spans=(Span("round", 1000.0, None, {"round": 1, "world_size": 4}),)),
    Update(spans=(Span("restore", 1001.0, 1003.5, {"round": 1, "step": 0}),)),
    *(own(name, value) for name, value in {"world_size": 4, "goodput": 0.9, "step_seconds": 0.25}.items()),
    own("restarts", 0),
    own("checkpoint_pause_seconds", 0.5),
    Update((Value("loss", 1, 0.5, 1000.0),)),
    own("checkpoint_pause_seconds", 0.25, 9),
    Update(spans=(Span("save", 1009.0, 1009.5, {"round": 1, "step": 9}),)),
    Update(spans=(Span("round", 1000.0, 1010.0, {"round": 1}),)),
    own("restarts", 2, 10),
    own("world_size", 2, 10),
]


def test_metrics_and_spans_have_the_values_and_times_of_the_events():
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    publisher = OpenTelemetryPublisher({"azureml_elastic.run": "run-1"}, reader, SimpleSpanProcessor(exporter))
    publisher.publish(UPDATES)
    (resource,) = reader.get_metrics_data().resource_metrics
    assert resource.resource.attributes["azureml_elastic.run"] == "run-1"
    found = {
        metric.name: (metric.unit, point.value)
        for metric in resource.scope_metrics[0].metrics
        for point in metric.data.data_points
    }
    assert found == {
        "azureml_elastic.world_size": ("{worker}", 2),
        "azureml_elastic.goodput": ("1", 0.9),
        "azureml_elastic.step.duration": ("s", 0.25),
        "azureml_elastic.restarts": ("{round}", 2),
        "azureml_elastic.checkpoint.pause": ("s", 0.75),
    }
    restore, save, round_ = exporter.get_finished_spans()
    assert [span.name for span in (restore, save, round_)] == [
        "azureml_elastic.restore",
        "azureml_elastic.save",
        "azureml_elastic.round",
    ]
    assert {span.context.trace_id for span in (restore, save)} == {round_.context.trace_id}
    assert {span.parent.span_id for span in (restore, save)} == {round_.context.span_id}
    assert (restore.start_time, restore.end_time) == (1_001_000_000_000, 1_003_500_000_000)
    assert round_.end_time - round_.start_time == 10_000_000_000
    assert round_.attributes == {"azureml_elastic.round": 1, "azureml_elastic.world_size": 4}
    publisher.close()


@contextmanager
def receiver():
    """Receive OTLP over HTTP; yield the address and the bodies by path."""
    bodies: dict[str, list[bytes]] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.setdefault(self.path, []).append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_otlp_receiver_gets_everything_at_the_end(monkeypatch):
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with receiver() as (address, bodies):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        publisher = open_otlp("run-1", "node-0", NodeEnvironment.read({"OTEL_EXPORTER_OTLP_ENDPOINT": address}))
        publisher.publish(UPDATES)
        publisher.close()
    metrics = ExportMetricsServiceRequest.FromString(bodies["/v1/metrics"][-1]).resource_metrics[0]
    attributes = {each.key: each.value.string_value for each in metrics.resource.attributes}
    assert attributes["service.name"] == "azureml_elastic"
    assert attributes["azureml_elastic.node"] == "node-0"
    assert len(metrics.scope_metrics[0].metrics) == 5
    spans = [
        span.name
        for body in bodies["/v1/traces"]
        for span in ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    ]
    assert sorted(spans) == ["azureml_elastic.restore", "azureml_elastic.round", "azureml_elastic.save"]
