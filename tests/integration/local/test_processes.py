"""Process trees are frozen and killed completely, including orphans."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from azureml_elastic.local.processes import NodeProcesses
from tests.support.waiting import until

# An agent with a worker in a session of its own, which has a child of its own; all write their ids and wait.
TREE = """
import os, subprocess, sys, time
depth, folder = int(sys.argv[1]), sys.argv[2]
if depth:
    subprocess.Popen([sys.executable, "-c", sys.argv[3], str(depth - 1), folder, sys.argv[3]], start_new_session=True)
open(os.path.join(folder, f"{depth}.part"), "w").write(str(os.getpid()))
os.rename(os.path.join(folder, f"{depth}.part"), os.path.join(folder, f"{depth}.pid"))
if depth and len(sys.argv) > 4:
    sys.exit(0)
while True:
    time.sleep(0.01)
    with open(os.path.join(folder, f"{depth}.beat"), "a") as file:
        file.write(".")
"""


def alive(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def start_tree(processes, folder, *, name="node-0", agent_exits=False):
    folder.mkdir()
    argv = [sys.executable, "-c", TREE, "2", str(folder), TREE] + (["exit"] if agent_exits else [])
    node = processes.start(name, argv, dict(os.environ))
    until(lambda: all((folder / f"{depth}.pid").exists() for depth in (0, 1, 2)))
    return node, [int((folder / f"{depth}.pid").read_text()) for depth in (2, 1, 0)]


def beats(folder):
    return {path.name: path.stat().st_size for path in folder.glob("*.beat")}


def test_the_tree_includes_workers_in_sessions_of_their_own(tmp_path):
    with NodeProcesses(tmp_path / "logs") as processes:
        node, pids = start_tree(processes, tmp_path / "a")
        assert {process.pid for process in node.tree()} == set(pids)
        assert node.kill() == 3
        assert not any(alive(pid) for pid in pids)
        assert node.exit_code() == -signal.SIGKILL
        assert not any(psutil.pid_exists(pid) for pid in pids), "zombies were left"


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="tensors are shared elsewhere")
def test_what_a_killed_node_has_shared_is_removed_with_it(tmp_path):
    """The files have the names that torch gives them; the processes that would remove them are killed, too."""
    with NodeProcesses(tmp_path / "logs") as processes:
        node, pids = start_tree(processes, tmp_path / "a")
        _, others = start_tree(processes, tmp_path / "b", name="node-1")
        shared = [Path(f"/dev/shm/torch_{pid}_1_{tmp_path.name}") for pid in (*pids, others[0])]
        try:
            for path in shared:
                path.touch()
            node.kill()
            assert [path.exists() for path in shared] == [False, False, False, True], "another node's stay"
        finally:
            for path in shared:
                path.unlink(missing_ok=True)


# An agent that holds a tensor which a process shares that has ended since, as a data loader's worker does.
SHARING = """
import sys, time
import torch.multiprocessing as processes
from torch import zeros
processes.set_sharing_strategy("file_system")
def share(queue, go_on):
    queue.put(zeros(10))
    go_on.wait()
if __name__ == "__main__":
    context = processes.get_context("fork")
    queue, go_on = context.Queue(), context.Event()
    child = context.Process(target=share, args=(queue, go_on))
    child.start()
    held = queue.get()
    go_on.set()
    child.join()
    open(sys.argv[1], "w").write(str(child.pid))
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="tensors are shared elsewhere")
def test_what_ended_processes_of_a_killed_node_have_shared_is_removed_with_it(tmp_path):
    with NodeProcesses(tmp_path / "logs") as processes:
        node = processes.start("node-0", [sys.executable, "-c", SHARING, str(tmp_path / "pid")], dict(os.environ))
        until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
        pattern = f"torch_{(tmp_path / 'pid').read_text()}_*"
        assert list(Path("/dev/shm").glob(pattern)), (tmp_path / "logs/node-0.log").read_text()
        assert node.kill() == 1, "what cleans up is not counted"
    assert not list(Path("/dev/shm").glob(pattern))


def test_a_frozen_tree_stops_resumes_and_can_be_killed(tmp_path):
    folder = tmp_path / "a"
    with NodeProcesses(tmp_path / "logs") as processes:
        node, pids = start_tree(processes, folder)
        node.freeze()
        until(lambda: all(psutil.Process(pid).status() == psutil.STATUS_STOPPED for pid in pids))
        before = beats(folder)
        assert node.exit_code() is None
        node.thaw()
        until(lambda: all(size > before.get(name, 0) for name, size in beats(folder).items()))
        node.freeze()
        assert node.kill() == 3
        assert not any(alive(pid) for pid in pids)


def test_orphans_of_an_agent_that_has_exited_are_still_found(tmp_path):
    with NodeProcesses(tmp_path / "logs") as processes:
        node, pids = start_tree(processes, tmp_path / "a", agent_exits=True)
        until(lambda: node.exit_code() is not None)
        assert node.exit_code() == 0
        assert {process.pid for process in node.tree()} == set(pids[1:])
        assert node.kill() == 2
        assert not any(psutil.pid_exists(pid) for pid in pids)


def test_one_node_s_end_leaves_the_others_alone(tmp_path):
    with NodeProcesses(tmp_path / "logs") as processes:
        first, _ = start_tree(processes, tmp_path / "a", name="node-1")
        _, others = start_tree(processes, tmp_path / "b", name="node-10")
        first.kill()
        assert all(alive(pid) for pid in others)
        assert {process.pid for process in processes.remaining()} == set(others)


def test_nothing_is_left_after_an_exception(tmp_path):
    pids = []
    with contextlib.suppress(KeyboardInterrupt), NodeProcesses(tmp_path / "logs") as processes:
        node, pids = start_tree(processes, tmp_path / "a")
        node.freeze()
        raise KeyboardInterrupt
    assert len(pids) == 3
    assert not any(alive(pid) for pid in pids)


def test_sigterm_reaches_the_agent_alone(tmp_path):
    with NodeProcesses(tmp_path / "logs") as processes:
        node, pids = start_tree(processes, tmp_path / "a")
        node.terminate()
        until(lambda: node.exit_code() is not None)
        assert node.exit_code() == -signal.SIGTERM
        assert [alive(pid) for pid in pids] == [False, True, True]


def test_the_output_of_the_whole_tree_is_in_the_log(tmp_path):
    with NodeProcesses(tmp_path / "logs") as processes:
        script = "import subprocess; print('agent', flush=True); subprocess.run(['sh', '-c', 'echo worker >&2'])"
        node = processes.start("node-0", [sys.executable, "-c", script], dict(os.environ))
        until(lambda: node.exit_code() is not None)
        assert (tmp_path / "logs" / "node-0.log").read_text().split() == ["agent", "worker"]


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_launcher_is_killed(tmp_path, sign):
    launcher = (
        "import sys, time, pathlib, importlib.util\n"
        "spec = importlib.util.spec_from_file_location('tests_processes', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec); spec.loader.exec_module(module)\n"
        "folder = pathlib.Path(sys.argv[2])\n"
        "with module.NodeProcesses(folder / 'logs') as processes:\n"
        "    node, pids = module.start_tree(processes, folder / 'a')\n"
        "    node.freeze()\n"
        "    print(*pids, flush=True)\n"
        "    time.sleep(60)\n"
    )
    argv = [sys.executable, "-c", launcher, str(Path(__file__)), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(word) for word in process.stdout.readline().split()]
        process.send_signal(sign)
        process.wait(300)
    assert len(pids) == 3
    until(lambda: not any(alive(pid) for pid in pids))
