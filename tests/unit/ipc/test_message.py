"""Messages as dataclasses: the way to JSON and back, and what is refused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from azureml_elastic.ipc.message import MalformedMessage, MessageCodec


@dataclass(frozen=True)
class Greeting:
    node: str
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class AllDone:
    pass


CODEC: MessageCodec[Greeting | AllDone] = MessageCodec(Greeting, AllDone)


@pytest.mark.parametrize("message", [Greeting("a", (1, 2)), Greeting("a"), AllDone()])
def test_a_message_survives_the_way_through_json(message):
    assert CODEC.decode(json.loads(json.dumps(CODEC.encode(message)))) == message


def test_defaults_are_not_sent_and_unknown_fields_are_ignored():
    assert CODEC.encode(Greeting("a")) == {"op": "greeting", "node": "a"}
    assert CODEC.decode({"op": "all_done", "since": "a later release"}) == AllDone()


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "op=None is not one of greeting, all_done"),
        ({"op": ["greeting"]}, "is not one of"),
        ({"op": "greeting"}, "'greeting' with node: Field required"),
        ({"op": "greeting", "node": 3}, "node: Input should be a valid string"),
        ({"op": "greeting", "node": "a", "ranks": [1, "x"]}, r"ranks\.1: "),
    ],
)
def test_a_malformed_message_is_refused_and_its_connection_closed(fields, problem, caplog):
    with pytest.raises(MalformedMessage, match=problem):
        CODEC.decode(fields)
    reasons = []
    assert CODEC.receive(SimpleNamespace(peer="10.0.0.5:1", close=reasons.append), fields) is None
    assert reasons[0].startswith("the peer sent a malformed message: ")
    assert "Closing the connection to 10.0.0.5:1" in caplog.text
