"""How a newcomer gets ready before it asks for a place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from azureml_elastic.errors import RunSucceeded
from azureml_elastic.node.agent.worker_group import WorkerGroup


class Node:
    """A node whose preload server becomes ready and settled at these times."""

    def __init__(self, ready: float, settled: float) -> None:
        self.now = 0.0
        self._ready, self._settled = ready, settled
        self.reads = 0
        self.ended_at = float("inf")
        self.group = WorkerGroup(
            self, SimpleNamespace(), 1, self, stays=False, handover_seconds=5.0, interval=0.5,
            clock=lambda: self.now,
        )  # fmt: skip

    @property
    def ready(self) -> bool:
        return self.now >= self._ready

    @property
    def settled(self) -> bool:
        return self.now >= self._settled

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def given_up(self) -> bool:
        self.reads += 1
        if self.now >= self.ended_at:
            raise RunSucceeded("The run ended well in round 3.")
        return False

    def warm_up(self, *, settle: bool = True) -> float:
        """Return how long it took."""
        began = self.now
        waited = self.group.warm_up(settle=settle)
        assert waited == (self.now > began)
        return self.now


NEVER = float("inf")


@pytest.mark.parametrize(
    ("ready", "settled", "settle", "expected"),
    [
        (2.0, 5.0, True, 5.0),
        (2.0, 5.0, False, 2.0),
        (100.0, 110.0, True, 110.0),
        (100.0, NEVER, True, 130.0),
        (100.0, 100.0, False, 100.0),
        (NEVER, 8.0, True, 8.0),  # the preload server refuses
        (NEVER, NEVER, True, 600.0),
        (NEVER, NEVER, False, 600.0),
    ],
)
def test_a_newcomer_waits_for_its_imports_up_to_ten_minutes(ready, settled, settle, expected):
    assert Node(ready, settled).warm_up(settle=settle) == expected


def test_imports_that_hang_are_logged(caplog):
    node = Node(NEVER, NEVER)
    node.warm_up()
    assert "The script's imports have not ended within 600 s" in caplog.text
    assert node.reads < 61
    assert node.warm_up() == 600.0, "it does not wait again"


def test_a_node_that_is_ready_does_not_wait_again():
    node = Node(2.0, NEVER)
    assert node.warm_up(settle=False) == 2.0
    assert node.warm_up() == 32.0
    assert node.warm_up() == 32.0


def test_a_newcomer_that_still_imports_notices_the_end_of_the_run():
    node = Node(300.0, 300.0)
    node.ended_at = 42.0
    with pytest.raises(RunSucceeded):
        node.warm_up()
    assert 42.0 <= node.now < 52.5
