"""Checks of the GPUs, in a separate process so that the agent never creates a CUDA context.

That process, ``python -m azureml_elastic.node.diagnostics.checks.accelerator``, multiplies two matrices of small
integers on each GPU and on the CPU. Single precision represents every factor, product and sum exactly, and
TensorFloat-32 the factors, so that the result is the same in any order of addition and each wrong bit is detected.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from azureml_elastic.environment.node import visible_devices
from azureml_elastic.environment.process import Environment
from azureml_elastic.node.diagnostics.findings import Finding

_MODULE = "azureml_elastic.node.diagnostics.checks.accelerator"
_SIZE = 512
_LARGEST = 4
_GIB = 1 << 30
_TAIL_CHARACTERS = 400
_FREE_MEMORY = 0.5  # share of a GPU's memory; with less, other processes have the rest

_GPU_ADVICE = "Reset or replace the GPU; see `nvidia-smi` and the kernel's log (Xid) for details."


def count_devices() -> int:
    """Return the number of GPUs that the driver lists."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])


def count_visible_devices(environment: Environment) -> int:
    """Return the number of GPUs that the workers see, without an import of torch, which may take seconds."""
    visible = visible_devices(environment)
    return count_devices() if visible is None else visible


def check_gpus(expected: int, timeout: float, *, device: str = "cuda") -> list[Finding]:
    """Compute on every visible GPU.

    Args:
        expected: number of GPUs that the driver lists.
        timeout: time limit in seconds, including the import of torch.
    """
    name, limit = "gpu", f"{expected} GPUs that compute"
    command = [sys.executable, "-m", _MODULE, "--device", device, "--seconds", str(int(timeout) + 1)]
    code, output, errors = _run(command, timeout)
    if code is None:
        value = f"no answer within {timeout:g} s"
        return [Finding(name, "fail", value, limit, _GPU_ADVICE)]
    documents = [line for line in output.splitlines() if line.startswith("{")]
    if code != 0 or not documents:
        return [Finding(name, "fail", f"exit code {code}: {errors[-_TAIL_CHARACTERS:].strip()}", limit, _GPU_ADVICE)]
    devices: list[dict[str, Any]] = json.loads(documents[-1])["devices"]
    findings = list(map(_device_finding, devices))
    if len(devices) < expected:
        value = f"torch sees {len(devices)} of {expected}"
        advice = f"{_GPU_ADVICE} A torch that was built for another CUDA, or for none, sees no GPU either."
        findings.insert(0, Finding(name, "fail", value, limit, advice))
    return findings


def check_ecc(timeout: float) -> list[Finding]:
    """Read uncorrected memory errors from the driver's tool; without the tool there are no findings."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    name, wanted = "gpu memory errors", "none"
    query = "--query-gpu=index,ecc.errors.uncorrected.volatile.total"
    code, output, errors = _run([tool, query, "--format=csv,noheader,nounits"], timeout)
    if code is None:
        return [Finding(name, "fail", f"no answer within {timeout:g} s", wanted, _GPU_ADVICE)]
    if code != 0:
        message = (errors or output)[-_TAIL_CHARACTERS:].strip()
        return [Finding(name, "warn", f"not checked: exit code {code}: {message}", wanted)]
    counts = [(index, count.strip()) for index, _, count in (line.partition(",") for line in output.splitlines())]
    return [
        Finding(f"gpu {index} memory errors", "fail" if int(count) else "ok", count, wanted, _GPU_ADVICE)
        for index, count in counts
        if count.isdigit()  # not "[N/A]"
    ]


def examine(device: str) -> dict[str, Any]:
    """Compute on one device in this process and return the result, including any error."""
    import torch

    found: dict[str, Any] = {"device": device, "error": "", "free": None, "total": None}
    try:
        numbers = torch.Generator().manual_seed(0)
        left, right = (
            torch.randint(-_LARGEST, _LARGEST + 1, (_SIZE, _SIZE), generator=numbers, dtype=torch.float32)
            for _ in range(2)
        )
        if device.startswith("cuda"):
            found["name"] = torch.cuda.get_device_name(device)
            found["free"], found["total"] = torch.cuda.mem_get_info(device)
        product = (left.to(device) @ right.to(device)).cpu()
        wrong = int((product != left @ right).sum())
        if wrong:
            found["error"] = f"{wrong} of {_SIZE * _SIZE} numbers of a matrix product are wrong"
    except Exception as error:  # noqa: BLE001 - whatever a broken GPU raises
        found["error"] = f"{type(error).__name__}: {error}"
    return found


def _device_finding(found: dict[str, Any]) -> Finding:
    name, limit = f"gpu {found['device']}", "the CPU's matrix product"
    if found["error"]:
        return Finding(name, "fail", found["error"][:_TAIL_CHARACTERS], limit, _GPU_ADVICE)
    value = f"computes as the CPU does{', ' + found['name'] if found.get('name') else ''}"
    if found["total"]:
        value += f", {found['free'] / _GIB:.1f} of {found['total'] / _GIB:.1f} GiB free"
        if found["free"] < _FREE_MEMORY * found["total"]:
            limit, advice = f"{_FREE_MEMORY:.0%} of its memory free", "End the other processes that use this GPU."
            return Finding(name, "warn", value, limit, advice)
    return Finding(name, "ok", value, limit)


def _run(command: Sequence[str], timeout: float) -> tuple[int | None, str, str]:
    """Run a command and return its exit code, output and errors; after the time limit, kill it and return no code."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a defective driver may keep it alive: it is abandoned
            process.communicate(timeout=1)
        return None, "", ""
    return process.returncode, output, errors


def _main() -> int:
    parser = argparse.ArgumentParser(description="Compute on every visible device and print what was found as JSON.")
    parser.add_argument("--device", default="cuda", help="torch's name of the device type")
    parser.add_argument("--seconds", type=int, default=60, help="time limit of this process")
    arguments = parser.parse_args()
    signal.alarm(arguments.seconds)  # in case the agent is killed
    import torch

    count = torch.cuda.device_count() if arguments.device == "cuda" else 1
    names = [f"cuda:{index}" for index in range(count)] if arguments.device == "cuda" else [arguments.device]
    print(json.dumps({"devices": [examine(name) for name in names]}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_main())
