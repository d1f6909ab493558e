"""Joins a run as a process of its own, says so, and stays in its round: ``python -m ... TABLE NAME``."""

from __future__ import annotations

import sys
import time

from tests.support.rendezvous.nodes import Nodes

if __name__ == "__main__":
    path, name = sys.argv[1:]
    nodes = Nodes(path)
    nodes.hasten(heartbeat_timeout=0.5, takeover_delay=0.1)
    node = nodes.make(name)
    node.announce()
    node.join()
    print("joined", flush=True)
    time.sleep(300)
