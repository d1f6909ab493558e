"""Metrics of a run where people look already: MLflow, TensorBoard and OpenTelemetry."""
