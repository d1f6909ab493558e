"""The stacks of real processes that hang, taken as a node's agent takes them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from azureml_elastic.ipc.agent_interface import WorkerIdentity
from azureml_elastic.ipc.stack_file import StackFile, stack_files
from azureml_elastic.node.driver import EventQueue
from azureml_elastic.node.hangs.stack_dump import (
    ProcessStacks,
    StackReporter,
    Worker,
    collect,
    main_thread_first,
    render,
    stack_folders,
    waiting_lines,
)
from azureml_elastic.train.agent_client.stack_dump import register_stack_dump, unregister_stack_dump
from tests.support.train import hangs
from tests.support.waiting import until
from tests.support.worlds import CONTEXT, store_on_a_free_port

PROGRAM = Path(hangs.__file__)


class Standing:
    """A process whose stacks can be taken."""

    def __init__(self, way: str, folder: Path, rank: int = 0, argument: str = "") -> None:
        self.rank = rank
        self.pipe, theirs = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=hangs.stand, args=(way, folder, rank, argument, theirs))
        self.process.start()
        theirs.close()

    def receive(self) -> str:
        assert self.pipe.poll(100), "it says nothing"
        return self.pipe.recv()

    def wait(self) -> None:
        assert self.receive() == "ready"

    def send(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    @property
    def worker(self) -> Worker:
        return Worker(self.rank, self.rank, self.process.pid)

    def end(self) -> None:
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        for child in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self.process.join(20)
        self.pipe.close()


@pytest.fixture
def stand(tmp_path):
    made: list[Standing] = []

    def start(way: str, rank: int = 0, argument: str = "") -> Standing:
        made.append(Standing(way, tmp_path, rank, argument))
        return made[-1]

    yield start
    for standing in made:
        standing.end()


def take(folder: Path, *standing: Standing) -> list[ProcessStacks]:
    return collect(folder, {one.rank: one.worker for one in standing}, seconds=60)


@pytest.fixture(scope="module")
def asleep(tmp_path_factory):
    """A process that sleeps, and the folder with its file; for tests that leave it as it is."""
    folder = tmp_path_factory.mktemp("asleep")
    standing = Standing("asleep", folder)
    standing.wait()
    until(lambda: "in forever" in take(folder, standing)[0].text)
    yield standing, folder
    standing.end()


@pytest.mark.parametrize(
    ("way", "line"),
    [("looping", "in looping"), ("matching", "in match"), ("locked", "in locked")],
)
def test_the_main_thread_is_found_whatever_it_does(stand, tmp_path, way, line):
    standing = stand(way)
    standing.wait()
    until(lambda: line in take(tmp_path, standing)[0].text)
    for _ in range(2):  # the request can be repeated
        (found,) = take(tmp_path, standing)
        assert found.remarks == ()
        assert found.text.startswith("Main thread 0x")
        assert line in found.text
        assert f'{PROGRAM}", line' in found.text
        assert found.text.count("Main thread") == 1
    assert standing.process.is_alive()


def test_a_collective_whose_peer_does_not_come_and_goes_on_when_it_does(stand, tmp_path):
    store = store_on_a_free_port()
    both = [stand("reducing", rank, f"{store.port}:{rank}:{tmp_path / 'go'}") for rank in (0, 1)]
    for one in both:
        one.wait()
    until(lambda: "in all_reduce" in take(tmp_path, *both)[0].text)
    waiting, sleeping = take(tmp_path, *both)
    assert "in all_reduce" in waiting.text
    assert waiting.text.startswith("Main thread")
    assert "in reducing" in sleeping.text
    assert "all_reduce" not in sleeping.text
    # As one that has not started them asks them.
    assert stack_folders(psutil.Process(one.process.pid) for one in both) == {tmp_path}
    lines = waiting_lines(collect(tmp_path, {}, seconds=60))
    assert [re.sub(r":\d+ ", ": ", line) for line in lines] == [
        f"rank 0 waits in all_reduce, called at {PROGRAM}: in reducing",
        f"rank 1 is at {PROGRAM}: in reducing",
    ]
    (tmp_path / "go").touch()
    assert [one.receive() for one in both] == ["sum 3"] * 2
    for one in both:
        one.process.join(120)
    assert [one.process.exitcode for one in both] == [0, 0]


def test_the_main_thread_comes_before_many_others(stand, tmp_path):
    standing = stand("many_threads")
    standing.wait()
    (found,) = take(tmp_path, standing)
    assert found.text.startswith("Main thread")
    assert found.text.index("in many_threads") < found.text.index("\nThread")
    assert len(re.findall(r"^Thread ", found.text, re.MULTILINE)) >= 30
    assert re.search(r"3\d threads", found.state)  # torch may have one of its own


def test_a_deep_stack_is_cut_by_its_writer(stand, tmp_path):
    standing = stand("deep")
    standing.wait()
    (found,) = take(tmp_path, standing)
    assert 90 < found.text.count("in descend") < 110


def test_forks_and_other_children_are_seen_and_none_dies_of_it(stand, tmp_path):
    standing = stand("with_children")
    standing.wait()
    children = psutil.Process(standing.process.pid).children()
    until(lambda: sum("sleep" in child.name() for child in children) == 1)
    until(lambda: sum("in in_a_fork" in one.text for one in take(tmp_path, standing)) == 2)
    worker, *others = take(tmp_path, standing)
    assert "in with_children" in worker.text
    forked = [one for one in others if "in in_a_fork" in one.text]
    assert len(forked) == 2
    assert all(one.text.startswith("Main thread") and one.name == "child of rank 0" for one in forked)
    assert len(others) == 4
    assert any(one.state.startswith("sleep is sleeping (S)") for one in others)
    assert not any("in_another_python" in one.text for one in others)  # it has no handler, and would die of the signal
    assert sum(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children) == 4


def test_the_workers_of_a_loader_are_seen(stand, tmp_path):
    standing = stand("loading")
    standing.wait()
    until(lambda: sum("in __getitem__" in one.text for one in take(tmp_path, standing)[1:]) == 2)
    until(lambda: "in loading" in take(tmp_path, standing)[0].text)


def test_a_stopped_process_is_said_to_be_stopped(asleep):
    standing, folder = asleep
    standing.send(signal.SIGSTOP)
    until(lambda: psutil.Process(standing.process.pid).status() == psutil.STATUS_STOPPED)
    began = time.monotonic()
    (found,) = take(folder, standing)
    assert time.monotonic() - began < 30  # a stopped process is reported before the timeout
    assert "(T)" in found.state
    assert "it takes no signal while it is stopped" in found.remarks
    assert found.text == ""
    standing.send(signal.SIGCONT)
    (found,) = take(folder, standing)
    assert "in forever" in found.text
    assert standing.process.is_alive()


@pytest.mark.parametrize("way", ["stranger", "unregistered"])
def test_a_process_without_a_handler_gets_no_signal(stand, tmp_path, way):
    standing = stand(way)
    standing.wait()
    (found,) = take(tmp_path, standing)
    assert found.state.startswith("python")
    assert "running (R)" in found.state or "sleeping (S)" in found.state
    assert found.text == ""
    assert standing.process.is_alive()


def test_a_worker_that_has_ended_is_named(tmp_path):
    process = subprocess.Popen(["true"])
    until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    workers = {0: Worker(0, 0, process.pid)}
    (found,) = collect(tmp_path, workers)
    assert "dead (Z)" in found.state
    assert found.text == ""
    process.wait()
    (found,) = collect(tmp_path, workers)
    assert (found.state, found.text) == ("gone", "")


def test_workers_below_a_shell_are_found_by_their_files(tmp_path):
    command = f"{sys.executable} -u {PROGRAM} asleep {tmp_path} 0 & wait"
    shell = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, text=True)
    try:
        assert shell.stdout.readline() == "ready\n"
        workers = {0: Worker(0, 0, shell.pid)}
        until(lambda: "in forever" in collect(tmp_path, workers, seconds=60)[0].text)
        (found,) = collect(tmp_path, workers, seconds=60)
        assert found.pid != shell.pid
    finally:
        for child in psutil.Process(shell.pid).children(recursive=True):
            child.kill()
        shell.kill()
        shell.wait(300)
        shell.stdout.close()


def test_the_file_tells_the_signal_and_registering_again_replaces_it(tmp_path):
    before = descriptors()
    try:
        first = register_stack_dump(tmp_path, WorkerIdentity(rank=3, local_rank=1, world_size=4, round=1))
        again = register_stack_dump(tmp_path, WorkerIdentity(rank=2, local_rank=1, world_size=3, round=2))
        assert first.signal == again.signal >= signal.SIGRTMIN
        assert [entry for _, entry in stack_files(tmp_path)] == [again]
        assert (again.rank, again.pid, again.main_thread) == (2, os.getpid(), threading.main_thread().ident)
        assert descriptors() == before + 1
        os.kill(os.getpid(), again.signal)
        text = again.path(tmp_path).read_text()
        assert "test_the_file_tells_the_signal" in text
    finally:
        unregister_stack_dump()
    assert descriptors() == before


def test_a_signal_that_the_program_handles_is_left_to_it(tmp_path):
    took = []
    free = register_stack_dump(tmp_path, WorkerIdentity(0, 0, 1, 1)).signal
    unregister_stack_dump()
    previous = signal.signal(free, lambda number, _: took.append(number))
    try:
        entry = register_stack_dump(tmp_path, WorkerIdentity(0, 0, 1, 1))
        assert entry.signal == free + 1
        os.kill(os.getpid(), free)
        assert took == [free]
    finally:
        unregister_stack_dump()
        signal.signal(free, previous)


def test_a_folder_that_is_not_there_is_no_reason_to_fail(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert register_stack_dump(tmp_path / "gone", WorkerIdentity(0, 0, 1, 1)) is None
    assert "stacks cannot be written" in caplog.text


@pytest.mark.parametrize("content", [b"", b"{", b"[]\n", b'{"pid": 1}\n', b'{"pid": "x"}\n', b"\xff\n"])
def test_files_of_another_form_are_passed_over(tmp_path, content):
    path = StackFile(1, 0, 0, 40, 0).path(tmp_path)
    path.write_bytes(content)
    assert list(stack_files(tmp_path)) == []
    path.write_bytes(StackFile(1, 0, 0, 40, 0).to_line())
    assert [entry for _, entry in stack_files(tmp_path)] == [StackFile(1, 0, 0, 40, 0)]


def test_the_dumper_writes_a_file_and_the_log(asleep, tmp_path, caplog):
    standing, folder = asleep
    woken = EventQueue()
    reports = tmp_path / "run" / "stacks"
    dumper = StackReporter(folder, reports, "node-1", woken, seconds=30)
    with caplog.at_level(logging.ERROR):
        dumper.start("hang: no step", 7, [standing.worker], {0: 20})
        assert woken.wait(300)
    until(lambda: dumper.done)
    text = (reports / "round-7.node-1.txt").read_text()
    for output in (text, caplog.text):
        assert "===== Stacks of node-1, round 7: hang: no step =====" in output
        assert f"----- rank 0, pid {standing.process.pid}, after step 20: python" in output
        assert "in forever" in output
    assert "round-7.node-1.txt" in caplog.text


def test_a_dump_that_cannot_be_written_is_still_in_the_log(asleep, tmp_path, caplog):
    standing, folder = asleep
    (tmp_path / "run").write_text("a file where the folder should be")
    woken = EventQueue()
    reports = tmp_path / "run" / "stacks"
    dumper = StackReporter(folder, reports, "node-1", woken, seconds=30)
    with caplog.at_level(logging.WARNING):
        dumper.start("hang", 1, [standing.worker], {})
        assert woken.wait(300)
    assert "cannot be written" in caplog.text
    assert "in forever" in caplog.text


def test_long_dumps_are_cut_and_equal_children_written_once():
    frames = "\n".join(f'  File "/code/train.py", line {number} in f' for number in range(2000))
    worker = ProcessStacks("rank 0", 0, 10, "python is running (R)", f"Main thread 0x1:\n{frames}")
    children = [ProcessStacks("child of rank 0", 0, pid, "sleeping", "Main thread 0x1:\n  same") for pid in (11, 12)]
    text = render("node-0, round 1: hang", [worker, *children], {}, largest_process=2000)
    assert len(text) < 2600
    assert "more characters)" in text
    assert "child of rank 0, pid 11, 12" in text
    assert text.count("  same") == 1
    assert len(render("node-0, round 1: hang", [worker] * 50, {}, largest=5000)) < 5100


def test_the_main_thread_comes_first():
    dump = "Thread 0x02 (most recent call first):\n  b\n\nCurrent thread 0x01 (most recent call first):\n  a\n"
    assert main_thread_first(dump, 1) == (
        "Main thread 0x01 (most recent call first):\n  a\n\nThread 0x02 (most recent call first):\n  b"
    )
    assert main_thread_first("", 1) == ""
    assert main_thread_first("no threads", 1) == "no threads"


def descriptors() -> int:
    """Return the number of open stack files of this process."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, like the descriptor that reads this folder
            found += descriptor.readlink().suffix == ".stacks"
    return found
