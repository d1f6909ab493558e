"""An agent for the tests of training processes."""

from __future__ import annotations

import os
import queue
import threading

from azureml_elastic.ipc import MessageServer, listen
from tests.support.worlds import store_on_a_free_port

TIMEOUT_S = 60.0


class InterruptibleAgent:
    """What an interruption asks of the agent."""

    holds_snapshots = hands_whole_over = True

    def __init__(self):
        self.interrupted = threading.Event()

    def wait_interrupted(self, timeout):
        return self.interrupted.wait(timeout)


class FakeAgent:
    """Speaks the agent's side of the channel and keeps the pointer, as the node's agent does with its table."""

    def __init__(self, path):
        self.path = str(path)
        self.pointer = None
        self.memory = None
        self.kept = []
        self.refusals = []  # answers to the next commits instead of ok
        self.commits = []
        self.received = queue.Queue()
        self.on_step = None
        self.server = MessageServer(listen(self.path), self._on_message, self._on_close)

    def _on_message(self, connection, message):
        kind = message["op"]
        if kind == "hello":
            connection.state.update(message)
        if kind == "pointer":
            connection.send({"re": message["id"], "op": "pointer_reply", "pointer": self.pointer})
        elif kind == "memory":
            connection.send({"re": message["id"], "op": "memory_reply", "states": [self.memory] if self.memory else []})
        elif kind == "hand_over":
            descriptor = os.open(f"/proc/{message['pid']}/fd/{message['fd']}", os.O_RDONLY)
            self.kept.append(descriptor)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            state = connection.state
            self.memory = {"path": path, "step": message["step"], "round": state["round"], "rank": state["rank"]}
            connection.send({"re": message["id"], "op": "accepted"})
        elif kind == "commit":
            if self.refusals:
                connection.send({"re": message["id"], "op": "refused", **self.refusals.pop(0)})
                return
            self.pointer = {key: message[key] for key in ("directory", "step", "digest")}
            self.commits.append(message)
            connection.send({"re": message["id"], "op": "accepted"})
        else:
            if kind == "step" and self.on_step is not None:
                self.on_step(connection, message["step"])
            self.received.put((connection.state.get("rank"), message))

    def _on_close(self, connection):
        self.received.put((connection.state.get("rank"), {"op": "gone"}))

    def wait_for(self, kind, count=1):
        return self.wait_for_all(**{kind: count})[kind]

    def wait_for_all(self, **counts):
        """Wait for so many messages of each kind, in whatever order they come."""
        found = {kind: [] for kind in counts}
        while any(len(found[kind]) < count for kind, count in counts.items()):
            rank, message = self.received.get(timeout=TIMEOUT_S)
            if message["op"] in found:
                found[message["op"]].append((rank, message))
        return found

    def close(self):
        self.server.close()


class AssigningAgent(FakeAgent):
    """An agent that assigns ranks to parked workers once the expected number waits."""

    def __init__(self, path):
        super().__init__(path)
        self.waiting = {}
        self.size = 0
        self.number = 0
        self.stores = []

    def _on_message(self, connection, message):
        super()._on_message(connection, message)
        if message["op"] == "parked":
            self.waiting[connection.state["local_rank"]] = connection
            self._assign()

    def expect(self, size):
        """Start a round of this size once as many workers wait."""
        self.size = size
        self._assign()

    def interrupt(self, victim=2):
        """Send the end of the round to all but the victim, whose agent is lost with it."""
        for connection in self.server.connections:
            if connection.state["local_rank"] != victim:
                connection.send({"op": "interrupt", "whole": 0})

    def _assign(self):
        if self.size == 0 or len(self.waiting) < self.size:
            return
        self.stores.append(store_on_a_free_port())
        port = self.stores[-1].port
        self.number += 1
        chosen, self.waiting, size = dict(sorted(self.waiting.items())), {}, self.size
        self.size = 0
        for rank, connection in enumerate(chosen.values()):
            connection.state.update(round=self.number, rank=rank)
            environment = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
            assignment = {"op": "assign", "round": self.number, "rank": rank, "world_size": size}
            connection.send({**assignment, "environment": environment})
