"""An agent for the tests of training processes."""

from __future__ import annotations

import os
import queue

from azureml_elastic.ipc import MessageServer, listen

__all__ = ["TIMEOUT_S", "FakeAgent"]

TIMEOUT_S = 60.0


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
            connection.send({"re": message["id"], "pointer": self.pointer})
        elif kind == "memory":
            connection.send({"re": message["id"], "memory": self.memory})
        elif kind == "handover":
            descriptor = os.open(f"/proc/{message['pid']}/fd/{message['fd']}", os.O_RDONLY)
            self.kept.append(descriptor)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
            state = connection.state
            self.memory = {"path": path, "step": message["step"], "round": state["round"], "rank": state["rank"]}
            connection.send({"re": message["id"], "ok": True})
        elif kind == "commit":
            if self.refusals:
                connection.send({"re": message["id"], **self.refusals.pop(0)})
                return
            self.pointer = {key: message[key] for key in ("directory", "step", "digest")}
            self.commits.append(message)
            connection.send({"re": message["id"], "ok": True})
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
