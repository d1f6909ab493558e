"""The end of an engine's process, with all that it has started."""

from __future__ import annotations

import contextlib
import sys
import uuid

import psutil
import pytest

from azureml_elastic.engines.cluster import Child
from tests.support.waiting import until

MARK = "TESTED_CHILD"
FORKS_WITHOUT_END = """
import os, time
while os.fork():
    time.sleep(0.002)
os.setsid()
time.sleep(60)
"""


@pytest.fixture
def mark():
    value = uuid.uuid4().hex
    yield value
    for process in marked(value):
        with contextlib.suppress(psutil.Error):
            process.kill()


def marked(value):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def test_nothing_is_left_of_a_process_that_starts_others_while_it_is_killed(mark):
    for _ in range(3):
        child = Child([sys.executable, "-c", FORKS_WITHOUT_END], {MARK: mark})
        until(lambda: len(marked(mark)) >= 20)
        child.stop(0)
        until(lambda: not marked(mark), timeout=20)  # a kill takes a moment; one that is left would stay for a minute
