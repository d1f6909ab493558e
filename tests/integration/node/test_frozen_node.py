"""A node whose process is frozen: the kernel of its machine accepts connections, but nobody answers."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.support.paths import ROOT
from tests.support.rendezvous.nodes import Nodes


@pytest.fixture
def member(tmp_path):
    """A process with the only member of a running round."""
    command = [sys.executable, "-m", "tests.support.rendezvous.lone_node", tmp_path / "table.sqlite", "node-0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout.readline() == "joined\n"
        yield process
        process.kill()


def test_a_spare_beside_a_frozen_member_begins_the_next_round(member, tmp_path):
    nodes = Nodes(tmp_path / "table.sqlite")
    nodes.hasten(heartbeat_timeout=0.5, takeover_delay=0.1)
    try:
        member.send_signal(signal.SIGSTOP)
        spare = nodes.make("node-1")
        spare.announce()
        (assignment,) = nodes.join(spare)
        assert [each.node for each in assignment.round.members] == ["node-1"]
        assert assignment.round.number == 2
    finally:
        nodes.close()
