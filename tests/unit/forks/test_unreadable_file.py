"""The message of an uncaught exception names the file that could not be read."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from azureml_elastic.environment import names as variables
from azureml_elastic.forks.stack_imports import for_plain_start
from azureml_elastic.forks.unreadable_file import add_file_name, find_file
from azureml_elastic.node.failures.classification import signature_of
from azureml_elastic.node.failures.tracebacks import ExceptionInfo


def load_open(path, load):
    with Path(path).open("rb") as file:
        return load(file)


def load_pickle(path):
    with Path(path).open("rb") as file:
        return pickle.load(file)


def load_header(path):
    with safe_open(path, framework="pt") as file:
        return file.keys()


def load_twice(path):
    try:
        return torch.load(path)
    except Exception as error:
        raise ValueError("the checkpoint cannot be restored") from error


WRITERS = {
    ".pt": torch.save,
    ".safetensors": save_file,
    ".json": lambda value, path: path.write_text(json.dumps({"é": value["a"].tolist()}, ensure_ascii=False)),
    ".pkl": lambda value, path: path.write_bytes(pickle.dumps(value["a"].tolist())),
    ".npy": lambda value, path: np.save(path, value["a"].numpy()),
}
READERS = {
    "torch.load": (".pt", torch.load),
    "torch.load of text": (".pt", lambda path: torch.load(str(path), weights_only=False)),
    "torch.load of an open file": (".pt", lambda path: load_open(path, torch.load)),
    "load_file": (".safetensors", load_file),
    "safe_open": (".safetensors", load_header),
    "json.load": (".json", lambda path: load_open(path, json.load)),
    "pickle.load": (".pkl", load_pickle),
    "numpy.load": (".npy", np.load),
    "a chain": (".pt", load_twice),
}


@pytest.mark.parametrize("length", [0, 3, 300])
@pytest.mark.parametrize("reader", READERS)
def test_the_first_line_names_the_torn_file(tmp_path, reader, length):
    suffix, read = READERS[reader]
    path = tmp_path / f"checkpoint-12{suffix}"
    WRITERS[suffix]({"a": torch.randn(200)}, path)
    os.truncate(path, length)
    with pytest.raises(Exception) as raised:  # noqa: PT011 - the type is the reader's
        read(path)
    before = str(raised.value.__cause__ or raised.value)
    add_file_name(raised.value)
    add_file_name(raised.value)
    message = str(raised.value.__cause__ or raised.value)
    first = message.splitlines()[0]
    assert f"while reading {path} ({length} bytes, modified 2" in first
    assert "remove it if it is incomplete" in first
    assert message.count("while reading") == 1
    assert all(line in message for line in before.splitlines())


def test_the_signature_does_not_depend_on_the_size_and_the_time(tmp_path):
    def message(folder: str, length: int) -> str:
        path = tmp_path / folder / "state.json"
        path.parent.mkdir()
        path.write_text("{" + " " * length)
        os.utime(path, (length, length))
        with pytest.raises(json.JSONDecodeError) as raised:
            load_open(path, json.load)
        add_file_name(raised.value)
        return str(raised.value)

    first, second = message("a", 7), message("b", 100_000)
    assert first != second
    assert signature_of(ExceptionInfo("ValueError", first)) == signature_of(ExceptionInfo("ValueError", second))


def several_files(path):
    second = path.with_name("second.pkl")
    second.write_bytes(b"x")
    return pickle.loads(path.read_bytes() + second.read_bytes())


@pytest.mark.parametrize(
    "read",
    [
        lambda path: json.loads("{"),
        lambda path: json.loads(path.read_text()),
        lambda path: torch.load(path.with_name("missing.pt")),
        lambda path: int(path.read_text()),
        lambda path: load_open("/dev/null", json.load),
        lambda path: next(iter(())),
        several_files,
    ],
    ids=["a text", "the text of a file", "a missing file", "another error", "a device", "no reader", "several files"],
)
def test_other_errors_stay_as_they_are(tmp_path, read):
    path = tmp_path / "state.json"
    path.write_text("[1,")
    with pytest.raises(Exception) as raised:  # noqa: PT011
        read(path)
    message = str(raised.value)
    add_file_name(raised.value)
    assert (find_file(raised.value), str(raised.value)) == (None, message)


class TornError(Exception):
    """An exception whose message is not made from its arguments."""

    def __str__(self) -> str:
        return "torn"


class Row:
    """An object that cannot be unpickled."""

    def __getstate__(self):
        return {"a": 1}

    def __setstate__(self, state):
        raise TornError


def test_an_exception_that_makes_its_own_message_gets_a_note(tmp_path):
    path = tmp_path / "row.pt"
    torch.save(Row(), path)
    with pytest.raises(TornError) as raised:
        torch.load(path, weights_only=False)
    add_file_name(raised.value)
    assert raised.value.args == ()
    notes = getattr(raised.value, "__notes__", [])
    assert [str(path) in note for note in notes] == [True] * (sys.version_info >= (3, 11))


SCRIPT = """
import sys, torch
def main(path):
    torch.load(path)
main(sys.argv[1])
"""


def test_a_worker_that_is_started_plainly_names_it_in_its_traceback(tmp_path):
    script, path = tmp_path / "train.py", tmp_path / "ckpt.pt"
    script.write_text(SCRIPT)
    torch.save({"a": torch.randn(200)}, path)
    os.truncate(path, 100)
    environ = for_plain_start({**os.environ, variables.CHANNEL: "/nowhere"})
    done = subprocess.run(
        [sys.executable, str(script), str(path)], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"RuntimeError: while reading {path} (100 bytes, ")
    assert "PytorchStreamReader failed" in last
