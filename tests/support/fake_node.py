"""A small node without torch: the same command line, environment, events and exit codes as the real one.

Nodes know each other by locks that the system releases when their holder dies; the run's state is one file. Each step
is taken by the first node alive. The program is ``steps <n>``, ``grow <n> <nodes>`` (ends after n steps once that many
nodes train), ``meet <n> <node>`` (ends after n steps once that one does), ``fail <step> <code>``, ``hang``, ``deaf``
(hangs and ignores SIGTERM), ``orphan <n>`` (leaves its worker behind) or ``late <n>`` (like ``steps``, but its first
step comes a second after its workers). ``python script.py`` in front of it is ignored.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from azureml_elastic.config import Plan
from azureml_elastic.ledger import events

BATCH, DATASET, CHECKPOINT_EVERY = 10, 100, 5
STEP_SECONDS = 0.02


class Node:
    def __init__(self):
        self.plan = Plan.from_json(os.environ["AZUREML_ELASTIC_PLAN"])
        self.name = os.environ["AZUREML_ELASTIC_NODE_ID"]
        self.folder = Path(os.environ["AZUREML_ELASTIC_RUN_DIR"])
        self.log = (self.folder / "events" / f"{self.name}.jsonl").open("a")
        (self.folder / "alive").mkdir(exist_ok=True)
        self.round = self.step = 0
        self.leaving = False
        self.deadline = time.monotonic() + 60
        self.worker = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "leaving", True))

    def record(self, kind, **fields):
        event = kind(time=time.time(), node=self.name, round=fields.pop("round", self.round), **fields)
        self.log.write(event.model_dump_json() + "\n")
        self.log.flush()

    @contextmanager
    def shared(self):
        """The run's state, for one node at a time."""
        path = self.folder / "state.json"
        with (self.folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            fresh = {"round": 0, "members": [], "step": 0, "committed": 0, "ended": None}
            state = json.loads(path.read_text()) if path.exists() else fresh
            yield state
            new = path.with_suffix(".new")
            new.write_text(json.dumps(state))
            new.replace(path)

    def living(self):
        names = []
        for path in (self.folder / "alive").iterdir():
            with path.open("r") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    names.append(path.name)
        return names

    def run(self, program):
        alive = (self.folder / "alive" / self.name).open("w")
        fcntl.flock(alive, fcntl.LOCK_EX)
        if program[0] == "deaf":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.record(events.NodeStarted, host="localhost", pid=os.getpid())
        print(f"{self.name} runs {program} with {os.environ['OMP_NUM_THREADS']} thread", flush=True)
        try:
            while True:
                with self.shared() as state:
                    if (code := self.turn(state, program)) is not None:
                        return code
                time.sleep(STEP_SECONDS)
        finally:
            alive.close()
            if program[0] != "orphan":
                self.worker.kill()
                self.worker.wait()

    def turn(self, state, program):
        if self.leaving:
            self.record(events.NodeLeft, reason="preempted", exit_code=143)
            return 143
        if state["ended"] is not None:
            return state["ended"]
        living = self.living()
        members = [name for name in state["members"] if name in living]
        members += sorted(set(living) - set(members))
        limits = self.plan.resources
        settled = state["round"] or len(members) >= limits.max_instance_count or time.monotonic() > self.deadline
        if members != state["members"] and len(members) >= limits.min_instance_count and settled:
            if state["round"]:
                lost = tuple(set(state["members"]) - set(members))
                self.record(events.RoundReopened, round=state["round"], reason="lost" if lost else "new", lost=lost)
            state.update(round=state["round"] + 1, members=members, step=state["committed"])
        if state["round"] > self.round and self.name in state["members"]:
            self.round, self.step = state["round"], state["step"]
            rank = state["members"].index(self.name)
            size = len(state["members"]) * self.plan.distribution.process_count_per_instance
            self.record(events.RoundEntered, rank=rank, members=tuple(state["members"]), world_size=size)
            self.record(events.WorkersStarted, pids=(self.worker.pid,))
            if program[0] == "late" and self.round == 1:
                time.sleep(1.0)
            if rank == 0:
                self.record(events.Restored, step=state["step"])
        if state["members"][:1] == [self.name] and self.round == state["round"]:
            self.train(state, program)
        if state["step"] != self.step and self.round == state["round"]:
            self.step = state["step"]
            self.record(events.Progress, step=self.step)
        return state["ended"]

    def train(self, state, program):
        if program[0] == "fail" and state["step"] >= int(program[1]):
            self.record(events.WorkerFailed, rank=0, exit_code=int(program[2]), message="ValueError: as asked")
            self.record(events.RunEnded, succeeded=False, message="the program failed on purpose")
            state["ended"] = int(program[2])
            return
        enough = program[0] in ("steps", "orphan", "grow", "meet", "late") and state["step"] >= int(program[1])
        if program[0] == "grow":
            enough = enough and len(state["members"]) == int(program[2])
        if program[0] == "meet":
            enough = enough and program[2] in state["members"]
        if enough:
            self.record(events.RunEnded, succeeded=True)
            state["ended"] = 0
            return
        epoch, position = divmod(state["step"] * BATCH, DATASET)
        state["step"] += 1
        if self.plan.audit:
            line = {"round": self.round, "step": state["step"], "epoch": epoch}
            line["ids"] = list(range(position, position + BATCH))
            with (self.folder / "samples" / f"round-{self.round}.rank-0.jsonl").open("a") as file:
                done = {"round": line["round"], "step": line["step"], "done": True}
                file.write(f"{json.dumps(line)}\n{json.dumps(done)}\n")
        if state["step"] % CHECKPOINT_EVERY == 0:
            state["committed"] = state["step"]
            self.record(events.CheckpointCommitted, step=state["step"], directory="none", seconds=0.0)


if __name__ == "__main__":
    separator = sys.argv.index("--")
    words = sys.argv[separator + 1 :]
    sys.exit(Node().run(words[2:] if words[0] == "python" else words))
