"""Checksums of tensors in memory: whether one has changed, and whether it is the same on all ranks.

Version counters do not see what is written through ``.data``, as averages are by many libraries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from azureml_elastic.checkpoint.state.layout import memory_of

_ROW = 1024
"""Elements of a row, of which a device sums rows and columns: so that moved elements change the checksum as well."""
_STEP = 1031
"""Weight of a row beside that of the one before; larger than those of all columns."""


def checksums(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return a checksum of the bytes of each tensor; a device is waited for once."""
    results: list[int | torch.Tensor] = [_of_memory(each) if each.is_cpu else _on_device(each) for each in tensors]
    by_device: dict[torch.device, list[int]] = {}
    for index, each in enumerate(results):
        if isinstance(each, torch.Tensor):
            by_device.setdefault(each.device, []).append(index)
    for indices in by_device.values():
        values = torch.stack([torch.as_tensor(results[index]) for index in indices]).tolist()
        for index, value in zip(indices, values, strict=True):
            results[index] = int(value)
    return [int(each) for each in results]


def _of_memory(tensor: torch.Tensor) -> int:
    content = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return xxhash.xxh3_64_intdigest(memory_of(content))


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return the checksum as a tensor, int64 (), on the device, so that no kernel is waited for."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    wide = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    bits = flat.view(wide)
    whole = bits.numel() // _ROW * _ROW
    rows, rest = bits[:whole].view(-1, _ROW), bits[whole:]  # (n, _ROW), and fewer than _ROW
    columns = torch.arange(1, _ROW + 1, device=bits.device)
    numbers = torch.arange(1, len(rows) + 1, device=bits.device) * _STEP
    total = (rows.sum(0, dtype=torch.int64) * columns).sum() + (rows.sum(1, dtype=torch.int64) * numbers).sum()
    return total + (rest.to(torch.int64) * (columns[: rest.numel()] + _STEP * (len(rows) + 1))).sum()
