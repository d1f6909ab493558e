"""Measure what the ledger costs the training thread: ``run.log()``, what it adds to a commit, and the report of a step.

``python benchmarks/logging_values.py`` prints microseconds; the agent is a real channel on a real socket.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.node.records.event_recorder import Recorder
from azureml_elastic.train.agent_client.channel import ChannelAgent
from azureml_elastic.train.session.records import LoggedValues
from tests.support.channels import open_channel

STEPS = 5000


def measure(call, commit):
    """Return the median microseconds of both functions, called alternately."""
    called, committed = [], []
    for step in range(STEPS):
        start = time.perf_counter()
        call()
        middle = time.perf_counter()
        commit(step)
        end = time.perf_counter()
        called.append(middle - start)
        committed.append(end - middle)
        time.sleep(0.0002)  # a step
    return [f"{statistics.median(each) * 1e6:6.1f}" for each in (called, committed)]


def main():
    """Print the costs."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    loss = torch.tensor(0.5, device=device)
    cases = {
        "one float": {"loss": 0.5},
        f"two tensors ({device}) and a float": {"loss": loss, "norm": loss * 2, "rate": 0.1},
        "100 floats": {f"layer/{number}": 0.1 * number for number in range(100)},
    }
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder), "node-0", "inc", None)
        channel = open_channel(recorder)
        channel.begin(1, 1, None)
        agent = ChannelAgent(channel.path, WorkerIdentity(0, 0, 1, 1))
        values = LoggedValues(agent)
        try:
            print(f"{'':36s}   log commit  (median of {STEPS}, in microseconds)")
            print(f"{'nothing':36s}", *measure(lambda: None, values.commit))
            agent.restored(0, None)
            steps = itertools.count(1)
            reports, _ = measure(lambda: agent.completed(next(steps), 256), lambda _: None)
            print(f"{'a step is reported to the agent':36s}", reports)
            for name, given in cases.items():
                print(f"{name:36s}", *measure(lambda given=given: values.add(given, None), values.commit))
        finally:
            agent.close()
            channel.close()
            recorder.close()


if __name__ == "__main__":
    main()
