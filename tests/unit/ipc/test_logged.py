"""The message of logged values: numbers that JSON lacks, and what is refused."""

from __future__ import annotations

import json
import math

import pytest

from azureml_elastic.ipc.message import MalformedMessage
from azureml_elastic.ipc.worker_messages import FROM_WORKER, Logged


def test_all_floats_travel_as_json():
    values = {"loss/train": 0.1, "b": math.inf, "c": -math.inf, "d": math.nan, "e": 1e-300}
    text = json.dumps(FROM_WORKER.encode(Logged(3, values)), allow_nan=False)
    received = FROM_WORKER.decode(json.loads(text))
    assert received.step == 3
    assert math.isnan(received.values.pop("d"))
    del values["d"]
    assert received.values == values


@pytest.mark.parametrize(
    "values", [{"": 1}, {"a\n": 1}, {"a%": 1}, {"a" * 251: 1}, {"a": "x"}, {"a": None}, {str(n): 0 for n in range(101)}]
)
def test_other_names_and_values_are_refused(values):
    with pytest.raises(MalformedMessage, match="'logged' with values"):
        FROM_WORKER.decode({"op": "logged", "step": 1, "values": values})
