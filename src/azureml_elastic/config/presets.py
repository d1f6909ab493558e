"""Best practice for large training jobs on Azure ML, each piece with a switch: network, mounts, data, profiler.

What a preset sets are environment variables and modes of inputs, visible in the compiled job, and the job's own
``environment_variables`` and modes go before them. The sources:

- VM sizes: the letter ``r`` among the features in a size's name says that it has InfiniBand
  (https://learn.microsoft.com/azure/virtual-machines/vm-naming-conventions). Its machines reach each other by it within
  one scale set or cluster alone (https://learn.microsoft.com/azure/virtual-machines/sizes-hpc).
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
from azureml_elastic.config.profile import Profile

__all__ = ["Presets", "connection", "has_infiniband", "mode_of_input"]

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
"""In milliseconds. By default a node never looks again whether a file is there, and would miss what others write."""

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
    """What is set in a job beside what its author has said. ``None`` switches a preset off.

    Args:
        network: ``"infiniband"`` sets what NCCL needs on VM sizes that have it, ``"ethernet"`` keeps NCCL away from it.
            ``"auto"`` takes the first where the VM size is known to have it and all nodes are in one cluster or one
            job, the second where nodes of several have or may have it, and sets nothing else.
        mount: how mounted folders, of inputs and outputs alike, are read: ``"uncached"`` shows each node at once what
            another one has written; ``"prefetched"`` does too, and reads ahead; ``"cached"`` also keeps what was read
            in memory and on the node's disk, for data that are read several times.
        data: the mode of inputs that name none: ``"mount"``, ``"download"``, or ``"stream"``, which hands the script
            the address. ``None`` leaves it to Azure ML, which mounts.
        profile: steps and ranks for PyTorch's profiler.
    """

    network: Literal["auto", "infiniband", "ethernet"] | None = "auto"
    mount: Literal["uncached", "prefetched", "cached"] | None = "uncached"
    data: Literal["mount", "download", "stream"] | None = None
    profile: Profile | None = None

    def environment_variables(self, sizes: Collection[str | None], *, together: bool) -> dict[str, str]:
        """Return the variables that the presets set.

        Args:
            sizes: the VM sizes of the nodes; ``None`` for one that is not known.
            together: whether all nodes are in one cluster, or in one job.
        """
        return {**_NETWORKS[connection(self.network, sizes, together=together)], **_MOUNTS[self.mount]}


def has_infiniband(size: str) -> bool:
    """Return whether a VM size has InfiniBand, by its name.

    Args:
        size: such as ``"Standard_ND96asr_v4"``, in any case.
    """
    match = _SIZE.fullmatch(size.strip().lower())
    return match is not None and "r" in match["features"]


def connection(
    network: Literal["auto", "infiniband", "ethernet"] | None, sizes: Collection[str | None], *, together: bool
) -> Literal["infiniband", "ethernet"] | None:
    """Return how NCCL is to connect the nodes; ``None`` leaves it to NCCL.

    NCCL takes InfiniBand wherever it sees a card, and waits in vain for peers that the card does not reach: those in
    another cluster, or on machines without one.

    Args:
        network: of the presets.
        sizes: the VM sizes of the nodes; ``None`` for one that is not known.
        together: whether all nodes are in one cluster, or in one job.
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
    """Return the mode of an input that names none; ``None`` leaves it to Azure ML.

    Args:
        data: of the presets.
        kind: the input's type; models and literals are left alone.
    """
    return _MODES[data] if data is not None and kind in _TYPES_WITH_MODES else None
