"""A program with Ray: computes with tasks on all nodes, and waits for faults that the test injects.

``ray_program.py FOLDER lost`` blocks until its node is killed; started again, it waits for two nodes and finishes.
``ray_program.py FOLDER replaced`` finishes when another node has taken the place of one of its two.
``ray_program.py FOLDER evicted`` computes on three nodes, records each execution, reads its results when one of them
has left, then blocks until its node is killed; started again, it finishes with one node.
``ray_program.py FOLDER undisturbed`` does so with two nodes, and finishes.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

TASKS = 12
RECORDED = 24
SECONDS = 4
CPUS = 4  # of two nodes


@ray.remote(num_cpus=1)
def square(number):
    return number * number


@ray.remote(num_cpus=0)
class Service:
    """An actor that outlives the program, in a process that the raylet has put into a group of its own."""

    def ready(self):
        return True


@ray.remote(num_cpus=1)
def hold(began, seconds):
    """Hold a CPU for some seconds, and return the node's id."""
    began.touch()
    time.sleep(seconds)
    return ray.get_runtime_context().get_node_id()


def nodes():
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def until(condition):
    while not condition():
        time.sleep(0.1)


def on(node):
    return NodeAffinitySchedulingStrategy(node, soft=False)


def squares(numbers, ids):
    """Return the sum of squares, which each of these nodes has computed."""
    tasks = [square.options(scheduling_strategy=on(node)).remote(number) for number in numbers for node in ids]
    return sum(ray.get(tasks)) // len(ids)


def connect_with(token):
    """Try to connect to the cluster with a token, and return the exit code and the output."""
    program = [sys.executable, "-c", "import ray; ray.init(logging_level='error')"]
    environment = {**os.environ, "RAY_AUTH_TOKEN": token}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout + done.stderr


@ray.remote
def record(number, folder):
    """Return the square of a number; each execution is recorded."""
    with (folder / f"executed-{number}").open("a") as file:
        file.write("x")
    return number * number


def compute(folder, mode, start):
    """Compute with tasks on all nodes, and return the sum."""
    until(lambda: len(nodes()) >= {("evicted", 1): 3, ("evicted", 2): 1}.get((mode, start), 2))
    before = nodes()
    futures = [record.options(scheduling_strategy="SPREAD").remote(number, folder) for number in range(RECORDED)]
    ray.wait(futures, num_returns=RECORDED)
    (folder / "computed").touch()
    if mode == "evicted" and start == 1:
        until(lambda: not before <= nodes())
        (folder / "result-after-notice").write_text(str(sum(ray.get(futures))))
        until(lambda: False)
    (folder / "result").write_text(str(sum(ray.get(futures))))


def main(folder, mode):
    starts = folder / "starts"
    with starts.open("a") as file:
        file.write("x")
    start = len(starts.read_text())
    ray.init(logging_level="warning")
    if mode in ("evicted", "undisturbed"):
        compute(folder, mode, start)
        return
    until(lambda: len(nodes()) >= 2)
    before = nodes()
    total = squares(range(TASKS // 2), before)
    if start == 1:
        (other,) = before - {ray.get_runtime_context().get_node_id()}
        held = hold.options(scheduling_strategy=on(other), max_retries=0).remote(folder / "began", SECONDS)
        until((folder / "began").exists)
        until(lambda: ray.cluster_resources()["CPU"] == CPUS)
        (folder / "computed").touch()
        if mode == "lost":
            until(lambda: False)
        code, output = connect_with("0" * 64)
        (folder / "stranger").write_text(f"{code} {output}")
        until(lambda: other not in nodes() and len(nodes()) == 2)
        assert ray.get(held) == other  # it has ended before its node has left
    total += squares(range(TASKS // 2, TASKS), nodes())
    for index, node in enumerate(sorted(nodes())):  # they run when the cluster ends
        actor = Service.options(scheduling_strategy=on(node), name=f"service-{index}", lifetime="detached").remote()
        ray.get(actor.ready.remote())
    (folder / "result").write_text(str(total))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
