"""A fake agent with a preload server and one worker, which the test kills."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from starting import ENVIRON, preload_server

process = preload_server(sys.argv[1])
assert process.wait_ready(120), process.refusal
worker = process.start({**ENVIRON, "RANK": "wait"}, Path(sys.argv[2]), Path(sys.argv[2] + ".err"))
print(process.pid, worker.pid, flush=True)
time.sleep(600)
