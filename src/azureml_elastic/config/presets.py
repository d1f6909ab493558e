"""Recommended settings for large training jobs on Azure ML: network, mounts and data.

Presets set environment variables and modes of inputs, which are visible in the compiled job and which the job's own
settings override. Sources:

- VM sizes: the feature letter ``r`` in the name of a size indicates InfiniBand
  (https://learn.microsoft.com/azure/virtual-machines/vm-naming-conventions), which connects only the machines of one
  scale set or cluster (https://learn.microsoft.com/azure/virtual-machines/sizes-hpc).
- NCCL: https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; the values are those of Azure's own images
  for such machines (https://github.com/Azure/azhpc-images, ``customizations``) and of its example for Azure ML
  (https://github.com/Azure/mlops-project-template, ``cv/aml-cli-v2/data-science/src/environment/Dockerfile``).
- Mounts and modes: https://learn.microsoft.com/azure/machine-learning/how-to-read-write-data-v2.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Literal

from azureml_elastic.config.base import ConfigModel

_SIZE = re.compile(r"(?:standard_|basic_)?[a-z]+\d+(?:-\d+)?(?P<features>[a-z]*)(?:_.*)?")

_NETWORKS: Mapping[str | None, Mapping[str, str]] = {
    None: {},
    "infiniband": {
        "NCCL_SOCKET_IFNAME": "eth0",  # for finding each other; NCCL would take the InfiniBand card's ib0 first
        "NCCL_IB_PCI_RELAXED_ORDERING": "1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # GPUs are numbered as nvidia-smi does, next to their network cards
        "NCCL_DEBUG": "WARN",  # says why a collective has failed
    },
    "ethernet": {"NCCL_SOCKET_IFNAME": "eth0", "NCCL_IB_DISABLE": "1"},
}

_FRESH = {"DATASET_MOUNT_ATTRIBUTE_CACHE_TTL": "1"}
"""Cache lifetime in milliseconds. By default nodes cache file attributes forever and miss other nodes' files."""

_MOUNTS: Mapping[str | None, Mapping[str, str]] = {
    None: {},
    "uncached": {
        **_FRESH,
        "DATASET_MOUNT_CACHE_SIZE": "0",
        "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "False",
        "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "False",
        "DATASET_MOUNT_MEMORY_CACHE_SIZE": "0",
    },
    "prefetched": {
        **_FRESH,
        "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "True",
        "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "False",
        "DATASET_MOUNT_MEMORY_CACHE_SIZE": "0",
        "DATASET_MOUNT_READ_BUFFER_BLOCK_COUNT": "80",
    },
    "cached": {
        **_FRESH,
        "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "True",
        "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "True",
        "DATASET_MOUNT_CACHE_SIZE": str(-10 * 1024**3),  # bytes of the disk that it leaves free
    },
}

_MODES = {"mount": "ro_mount", "download": "download", "stream": "direct"}
_TYPES_WITH_MODES = frozenset({"mltable", "uri_file", "uri_folder"})


class Presets(ConfigModel):
    """Settings for network, mounts and data. ``None`` disables a preset.

    Args:
        network: NCCL settings. ``"infiniband"`` configures NCCL for VM sizes with InfiniBand; ``"ethernet"`` disables
            InfiniBand in NCCL. ``"auto"`` selects ``"infiniband"`` if the VM sizes are known to have it and all nodes
            are in one cluster or one job, ``"ethernet"`` if nodes of several clusters have or may have it, and nothing
            otherwise.
        mount: caching of mounted inputs and outputs. ``"uncached"`` makes files of other nodes visible at once;
            ``"prefetched"`` also reads ahead; ``"cached"`` also caches in memory and on the node's disk, for data that
            are read repeatedly.
        data: default mode of inputs: ``"mount"``, ``"download"``, or ``"stream"``, which passes the address to the
            script. ``None`` selects Azure ML's default, a mount.
    """

    network: Literal["auto", "infiniband", "ethernet"] | None = "auto"
    mount: Literal["uncached", "prefetched", "cached"] | None = "uncached"
    data: Literal["mount", "download", "stream"] | None = None

    def environment_variables(self, sizes: Collection[str | None], *, together: bool) -> dict[str, str]:
        """Return the environment variables of the presets."""
        return {**_NETWORKS[connection(self.network, sizes, together=together)], **_MOUNTS[self.mount]}


def has_infiniband(size: str) -> bool:
    """Return whether a VM size, such as ``"Standard_ND96asr_v4"``, has InfiniBand according to its name."""
    match = _SIZE.fullmatch(size.strip().lower())
    return match is not None and "r" in match["features"]


def connection(
    network: Literal["auto", "infiniband", "ethernet"] | None, sizes: Collection[str | None], *, together: bool
) -> Literal["infiniband", "ethernet"] | None:
    """Return the network that NCCL is configured for; ``None`` for NCCL's default.

    NCCL uses InfiniBand wherever it detects a card, and hangs if a peer is not reachable through it, such as a machine
    of another cluster or one without a card.

    Args:
        network: network preset.
        sizes: VM sizes of the nodes, ``None`` for an unknown one.
        together: whether all nodes are in one cluster or one job.
    """
    if network != "auto":
        return network
    known = {None if size is None else has_infiniband(size) for size in sizes}
    if known <= {False}:
        return None
    if together and known in ({True}, {None}):
        return "infiniband" if True in known else None
    return "ethernet"


def mode_of_input(data: str | None, kind: str) -> str | None:
    """Return the mode of inputs of a type by the data preset; ``None`` for models, literals and Azure ML's default."""
    return _MODES[data] if data is not None and kind in _TYPES_WITH_MODES else None
