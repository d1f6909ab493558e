"""Produces the ``*.txt`` beside it: what workers that fail in different ways write to their standard error.

Run it again after a change of torch or Python, and look at what has changed::

    python tests/unit/node/failures/worker_output/produce.py

Each script below really runs. Paths of the machine are replaced, so that the texts look like those of a job.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
from pathlib import Path

HERE = Path(__file__).parent

GROUP = """
import os, signal, sys, time
from datetime import timedelta
import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("COLLECTIVE_TIMEOUT", "30"))))

def step():
    dist.all_reduce(torch.ones(4))

step()
"""

SCRIPTS = {
    "user": """
        import json

        def load(path):
            return json.loads('{"path": "%s"' % path)

        def main():
            print(load("/tmp/tmp8gk2/part-0017.json"))

        main()
    """,
    "user_rank": GROUP + 'raise ValueError("loss is nan at sample 17")\n',
    "user_cause": """
        def read(number):
            try:
                return {}[number]
            except KeyError as error:
                raise ValueError(f"shard {number} of rank 3 at 0x7f3a5c is unknown") from error

        def main():
            try:
                read(12)
            except ValueError as error:
                raise RuntimeError("the data cannot be read") from error

        main()
    """,
    "user_context": """
        def clean():
            raise OSError("the folder is gone")

        def main():
            try:
                raise ValueError("bad sample")
            except ValueError:
                clean()

        main()
    """,
    "user_lines": """
        class Mismatch(Exception):
            pass

        raise Mismatch("these keys differ:\\n  encoder.0.weight\\n\\n  encoder.1.weight\\nand 7 others")
    """,
    "user_loader": """
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Broken(Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                raise ValueError(f"sample {index} is torn")

        if __name__ == "__main__":
            for batch in DataLoader(Broken(), num_workers=1):
                print(batch)
    """,
    "user_assertion": """
        def main():
            assert 1 + 1 == 3

        main()
    """,
    "user_then_noise": """
        import sys, threading, warnings

        class Late:
            def __del__(self):
                raise RuntimeError("not the cause")

        def worker():
            raise KeyError("not the cause either")

        late = Late()
        thread = threading.Thread(target=worker)
        thread.start()
        thread.join()
        warnings.warn("nor is this")
        raise ValueError("the cause")
    """,
    "user_interrupt": 'raise KeyboardInterrupt("by hand")\n',
    "import_module": "import numpyy.linalg\n",
    "import_name": "from json import loadz\n",
    "import_syntax": "def f(:\n    pass\n",
    "import_syntax_module": "import broken\n",
    "import_guarded": """
        try:
            import a_fast_one
        except ImportError:
            import a_slow_one
    """,
    "import_script": "",
    "import_target": "",
    "import_then_user": """
        try:
            import a_fast_one
        except ImportError:
            raise ValueError("the loss is nan")
    """,
    "out_of_memory_cpu": """
        import torch

        def build():
            return torch.empty(1 << 60)

        build()
    """,
    "out_of_memory_python": """
        def build():
            return bytearray(1 << 60)

        build()
    """,
    "out_of_memory_cuda": """
        import torch

        def forward():
            # As the allocator words it; this machine need not have a GPU.
            raise torch.OutOfMemoryError(
                "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 3 has a total capacity of 79.15 GiB of which "
                "11.94 GiB is free. Process 4711 has 67.20 GiB memory in use. Of the allocated memory 66.50 GiB is "
                "allocated by PyTorch, and 12.10 MiB is reserved by PyTorch but unallocated."
            )

        forward()
    """,
    "out_of_memory_handled": """
        import torch

        def report():
            raise RuntimeError("cannot train")

        try:
            torch.empty(1 << 60)
        except RuntimeError:
            report()
    """,
    "peer_killed": GROUP
    + """
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
step()
""",
    "timeout": GROUP
    + """
if dist.get_rank() == 1:
    time.sleep(60)
step()
""",
    "peer_store": GROUP
    + """
if dist.get_rank() == 1:
    time.sleep(1)
    dist.distributed_c10d._get_default_store().get("never set")
time.sleep(0.5)
os.kill(os.getpid(), signal.SIGKILL)
""",
    "peer_wrapped": GROUP
    + """
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    step()
except RuntimeError as error:
    raise ValueError("the step failed") from error
""",
    "peer_after_user": GROUP
    + """
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    raise ValueError("the loss is nan")
finally:
    time.sleep(0.5)
    step()
""",
    "peer_nccl": """
        import torch.distributed as dist

        def step():
            # As NCCL's errors are worded; this machine need not have a GPU.
            raise dist.DistBackendError(
                "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, remote process exited or there was a "
                "network error, NCCL version 2.27.5\\nncclRemoteError: A call failed possibly due to a network error "
                "or a remote process exiting prematurely.\\nLast error:\\n"
                "socketPollConnect: connect to 10.0.0.5<41234> failed : Connection refused"
            )

        step()
    """,
    "user_nccl": """
        import torch.distributed as dist

        raise dist.DistBackendError(
            "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:77, invalid usage (run with NCCL_DEBUG=WARN "
            "for details), NCCL version 2.27.5\\nncclInvalidUsage: This usually reflects invalid usage of NCCL library."
            "\\nLast error:\\nDuplicate GPU detected : rank 1 and rank 0 both on CUDA device 100000"
        )
    """,
    "user_reset": """
        def fetch():
            raise ConnectionResetError(104, "Connection reset by peer")

        fetch()
    """,
    "exit_code": "import sys\nsys.exit(3)\n",
    "exit_message": "import sys\nsys.exit('the folder /mnt/a/b has 3 files, not 4')\n",
    "exit_usage": """
        import argparse
        argparse.ArgumentParser(prog="train.py").parse_args(["--no-such-option"])
    """,
    "crashed": "import ctypes\nctypes.string_at(0)\n",
    "crashed_reported": """
        import ctypes, faulthandler
        faulthandler.enable()

        def kernel():
            ctypes.string_at(0)

        kernel()
    """,
    "crashed_abort": """
        import faulthandler, os
        faulthandler.enable()

        def give_up():
            os.abort()

        give_up()
    """,
    "timeout_watchdog": """
        import os, sys

        # As NCCL's watchdog thread ends its process; this machine need not have a GPU.
        print(
            "[rank5]:[E411 09:12:25.417 ProcessGroupNCCL.cpp:632] [Rank 5] Watchdog caught collective operation timeout"
            "\\nterminate called after throwing an instance of 'c10::DistBackendError'\\n  what():  [PG ID 0 PG GUID 0 "
            "Rank 5] Process group watchdog thread terminated with exception: [Rank 5] Watchdog caught collective "
            "operation timeout: WorkNCCL(SeqNum=811, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600012 milliseconds",
            file=sys.stderr, flush=True,
        )
        os.abort()
    """,
    "user_aborted": """
        import atexit, os, sys, traceback

        atexit.register(os.abort)
        raise ValueError("the loss is nan")
    """,
    "killed_survivor": """
        import logging, os, signal
        try:
            int("one")
        except ValueError:
            logging.exception("one sample was left out")
        os.kill(os.getpid(), signal.SIGKILL)
    """,
    "killed": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n",
}

PAIRS = {"peer_killed": 0, "timeout": 0, "peer_store": 1, "peer_wrapped": 0, "peer_after_user": 0, "user_rank": 0}
"""The scripts of two ranks, and the rank whose end is wanted."""


def main() -> None:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "broken.py").write_text("class A:\n    def f(self)\n        pass\n")
        for name, source in SCRIPTS.items():
            script = folder / "train.py"
            script.write_text(textwrap.dedent(source).lstrip())
            if name == "import_script":
                script.unlink()
            command = [sys.executable, "train.py"]
            if name == "import_target":
                command = [sys.executable, "-m", "nowhere.train"]
            code, text = pair(command, folder, PAIRS[name]) if name in PAIRS else alone(command, folder)
            (HERE / f"{name}.txt").write_text(f"exit code {code}\n{anonymous(text, folder)}")
            print(name, code)


def alone(command: list[str], folder: Path) -> tuple[int, str]:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stderr


def pair(command: list[str], folder: Path, wanted: int) -> tuple[int, str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    processes = []
    for rank in (0, 1):
        environment = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        environment |= {"MASTER_PORT": port, "COLLECTIVE_TIMEOUT": "4", "GLOO_SOCKET_IFNAME": "lo"}
        processes.append(subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True))
    try:
        _, text = processes[wanted].communicate(timeout=120)
        return processes[wanted].returncode, text
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


def anonymous(text: str, folder: Path) -> str:
    libraries = Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("stdlib"))
    for path, name in zip((folder.resolve(), *libraries), ("/mnt/job", *PLACES), strict=True):
        text = text.replace(str(path), name)
    return text.replace(sys.executable, "/opt/python/bin/python")


PLACES = "/opt/python/lib/python3.11/site-packages", "/opt/python/lib/python3.11"

if __name__ == "__main__":
    main()
