"""Run a script as the main program, and kill it in the step after a given one, once its checkpoint is committed."""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
from itertools import count
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_pre_hook
from waiting import until

steps, latest = int(sys.argv[1]), Path(sys.argv[2], "latest.json")
numbers = count(1)


def at_step(optimizer, *_):
    """Count the optimizer's steps, except for the empty steps with a learning rate of 0 that create its state."""
    if any(group["lr"] for group in optimizer.param_groups) and next(numbers) > steps:
        until(lambda: latest.exists() and json.loads(latest.read_text())["step"] == steps)
        os.kill(os.getpid(), signal.SIGKILL)


register_optimizer_step_pre_hook(at_step)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
