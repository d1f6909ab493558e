"""Numbers and lists of objects that keep state, and what they are set to in the next process."""

from __future__ import annotations

import collections
import json

import pytest
import torch

from azureml_elastic.train.found.numbers import Numbers


class Base:
    """Of a stack, by its module."""

    def __init__(self):
        self.of_the_stack = 0


Base.__module__ = "transformers.trainer_callback"


class Holder(Base):
    __slots__ = ("slot",)

    def __init__(self):
        super().__init__()
        self.count, self.text, self.constant, self.slot, self.nothing = 0, "", 5, 1.5, None
        self.history, self.recent = [], collections.deque(maxlen=3)
        self.metrics = {"train": collections.defaultdict(list), 7: 1}
        self.logs = {"texts": collections.deque(maxlen=2)}
        self.tensor, self.mixed, self.other = torch.zeros(1), [], object()

    def go_on(self):
        self.of_the_stack += 1
        self.count += 1
        self.text += "a"
        self.slot *= 2
        self.nothing = float("inf")
        self.history.append([self.count])
        self.recent.append(self.count)
        self.metrics["train"]["loss"].append(0.5)
        self.logs["texts"].append(str(self.count))
        self.mixed.append(torch.zeros(1))


CHANGED = {f"callback.{name}" for name in ("count", "text", "slot", "nothing", "history", "recent", "metrics", "logs")}


def watched(holder):
    numbers = Numbers()
    numbers.watch([("callback", holder), ("again", holder)])
    assert numbers.changed() == {}
    return numbers


def test_what_changes_and_no_stack_sets_is_carried_over():
    holder = Holder()
    numbers = watched(holder)
    holder.go_on()
    holder.go_on()
    first = numbers.changed()
    assert first.keys() == CHANGED
    assert numbers.collect() == {}  # until all ranks agree
    numbers.state = {*first}
    values = json.loads(json.dumps(numbers.collect()))

    other = Holder()
    again, shared = watched(other), other.history
    assert again.put({**values, "gone.count": 3}) == ["gone.count"]
    assert shared is other.history
    assert (other.count, other.text, other.slot, other.nothing) == (2, "aa", 6.0, float("inf"))
    assert (other.history, [*other.recent], other.recent.maxlen) == ([[1], [2]], [1, 2], 3)
    assert (other.logs["texts"].maxlen, [*other.logs["texts"]]) == (2, ["1", "2"])
    other.metrics["train"]["new"].append(1)
    assert other.metrics == {"train": {"loss": [0.5, 0.5], "new": [1]}, 7: 1}
    assert (other.of_the_stack, other.mixed) == (0, [])
    assert again.changed().keys() == CHANGED


@pytest.mark.parametrize("size", [10_001])
def test_long_lists_are_no_state(size):
    holder = Holder()
    numbers = watched(holder)
    holder.history.extend(range(size))
    holder.count += 1
    assert numbers.changed().keys() == {"callback.count"}
