"""The job that most tests change something of; it needs no azure-ai-ml."""

from azureml_elastic.config import ElasticResources
from azureml_elastic.submit.job import ElasticCommandJob

UNCACHED = {
    "DATASET_MOUNT_CACHE_SIZE": "0",
    "DATASET_MOUNT_ATTRIBUTE_CACHE_TTL": "1",
    "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "False",
    "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "False",
    "DATASET_MOUNT_MEMORY_CACHE_SIZE": "0",
}
"""What each job has by default."""


def small_job(placement="fan_out", more=None, **fields):
    """Return a job of two nodes, of which ``more`` are fields of their resources."""
    return ElasticCommandJob(
        **{
            "code": "src",
            "command": "python train.py",
            "environment": "azureml:env:1",
            "compute": "gpu",
            "resources": ElasticResources(**{"max_instance_count": 2, "placement": placement, **(more or {})}),
            **fields,
        }
    )
