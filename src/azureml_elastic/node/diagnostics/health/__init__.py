"""Whether this node can take part in a run: checked on threads while torch is imported, see ``docs/health.md``."""

from azureml_elastic.node.diagnostics.health.admission import Admission
from azureml_elastic.node.diagnostics.health.findings import Finding, HealthCheck, HealthReport, Probe
from azureml_elastic.node.diagnostics.health.probes import check_folders, node_probes

__all__ = [
    "Admission",
    "Finding",
    "HealthCheck",
    "HealthReport",
    "Probe",
    "check_folders",
    "node_probes",
]
