"""Syntax trees that are made while other threads make some, too."""

import ast
import gc
import subprocess
import sys

from azureml_elastic.program.source import parse_quietly

PROGRAM = """
import gc, sys, threading, time
from azureml_elastic.program.source import parse_quietly

class Finalized:
    def __init__(self):
        self.itself = self
    def __del__(self):
        time.sleep(0)  # another thread runs

def parse_beside(depth):
    if depth:
        return parse_beside(depth - 1)
    while not ended.is_set():
        try:
            compile("a = f(1)[2] + {}.x()", "beside", "exec", 0x400)
        except SystemError:
            pass

sys.setswitchinterval(1e-6)
gc.set_threshold(50)
ended = threading.Event()
beside = threading.Thread(target=parse_beside, args=(20,))
beside.start()
try:
    for _ in range(20):
        Finalized()
        assert parse_quietly(b"def f(a):\\n    return [x for x in a if x > 1]\\n" * 50) is not None
finally:
    ended.set()
    beside.join()
"""


def test_a_collection_that_lets_another_thread_parse_ends_in_no_error():
    """With ``ast.parse()`` alone CPython 3.11 raises SystemError in nearly each of these calls."""
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 0, ran.stderr


def test_collections_are_as_before():
    assert isinstance(parse_quietly(b"a = 1"), ast.Module)
    assert gc.isenabled()
    assert parse_quietly(b"a = ") is None
    assert gc.isenabled()
