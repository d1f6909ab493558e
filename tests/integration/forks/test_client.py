"""Life cycle of the preload server, its agent and its workers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from azureml_elastic.forks import client
from azureml_elastic.forks.client import PreloadServer
from azureml_elastic.forks.fork_checks import open_devices
from azureml_elastic.forks.process import ForkRefused
from azureml_elastic.node.failures.classification import FailedWorker
from azureml_elastic.program.command import Program
from tests.support.forks.starting import ENVIRON, gone, on_path, preload_server, run_forked, wait_for_text
from tests.support.paths import ROOT, SUPPORT

HERE = SUPPORT / "forks"
PROBE = str(HERE / "probe.py")


@pytest.fixture(scope="module")
def server():
    process = preload_server(PROBE)
    assert process.wait_ready(120), process.refusal
    yield process
    process.close()


def environment(probe, **more):
    return {**ENVIRON, "RANK": probe, **more}


def waiting(process, folder, **more):
    """Start a worker and return it once it waits."""
    worker = process.start(environment("wait", **more), folder / "out", folder / "err")
    wait_for_text(folder / "out", "waiting")
    return worker


LATE_SIGNAL = """
import os, signal, socket, sys, threading, time
from azureml_elastic.forks.command import Imports
from azureml_elastic.forks.server import EarlierImports, _Server

agent, link = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server = _Server(link, Imports(), {}, EarlierImports())
worker = os.fork()
if worker == 0:
    time.sleep(0.5)
    os._exit(3)
server._workers[worker] = False
threading.Thread(target=threading.Event().wait, daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # the other thread gets it: this one's poll() goes on
server.handle_one()
print(agent.recv(1000).decode(), flush=True)
os._exit(0)
"""


def test_the_end_of_a_worker_is_reported_where_its_signal_interrupts_nothing(tmp_path):
    """As where it comes between the interpreter's look at its signals and the system call: seldom."""
    path = script(tmp_path, LATE_SIGNAL)
    found = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(found.stdout)["code"] == 3


def script(folder, text):
    path = folder / "script.py"
    path.write_text(text)
    return path


def test_many_forks_in_a_row(server, tmp_path):
    seconds = []
    for number in range(20):
        start = time.monotonic()
        worker = server.start(environment("exit at once"), tmp_path / f"{number}.out", tmp_path / f"{number}.err")
        seconds.append(time.monotonic() - start)
        assert worker.wait(300) == 7
        assert worker.poll() == worker.returncode == 7
    print(f"20 forks: median {sorted(seconds)[10] * 1000:.0f} ms, slowest {max(seconds) * 1000:.0f} ms")
    assert server.ready


def test_the_id_of_an_ended_store_is_nobodys(monkeypatch):
    """The kernel may give it to another process, which the end of a preload server must not kill."""
    with contextlib.closing(preload_server(PROBE)) as process:
        assert process.wait_ready(120), process.refusal
        ours, theirs = socket.socketpair()
        with socket.create_server(("127.0.0.1", 0)) as listener, theirs:
            port = listener.getsockname()[1]
            store = process.fork_store("127.0.0.1", port, listener.fileno(), theirs.fileno())
        ours.close()
        assert store.wait(60) == 0
        ended = []
        monkeypatch.setattr(client, "_end_orphan", lambda pid, _until: ended.append(pid))
        process.close()
    assert ended == []


def test_the_next_store_is_forked_in_advance_and_ends_with_the_server():
    with contextlib.closing(preload_server(PROBE)) as process:
        until = time.monotonic() + 120
        while not process.settled:  # its imports fork as well
            assert time.monotonic() < until
            time.sleep(0.01)
        before = children(process.pid)
        with serving(process):
            wait_until(lambda: len(children(process.pid) - before) == 2)
            both = children(process.pid) - before
        wait_until(lambda: any(map(gone, both)))
        (spare,) = (pid for pid in both if not gone(pid))
        with serving(process) as port:
            TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False).set("key", "value")
            assert not gone(spare)
        wait_until(lambda: gone(spare))
        wait_until(lambda: children(process.pid) - before)
        left = children(process.pid) - before
    wait_until(lambda: all(map(gone, left)))


def wait_until(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextlib.contextmanager
def serving(process):
    """Have the server's fork serve a store; gives its port."""
    ours, theirs = socket.socketpair()
    with ours, socket.create_server(("127.0.0.1", 0)) as listener, theirs:
        port = listener.getsockname()[1]
        assert process.fork_store("127.0.0.1", port, listener.fileno(), theirs.fileno())
        yield port


def children(pid):
    return {child.pid for child in psutil.Process(pid).children()}


def test_exit_codes_are_kept_until_they_are_read(server, tmp_path):
    workers = [server.start(environment("exit with a number"), tmp_path / "out", tmp_path / "err") for _ in range(3)]
    assert workers[2].wait(300) == 3
    until = time.monotonic() + 60
    while not all(gone(worker.pid) for worker in workers[:2]):
        assert time.monotonic() < until
        time.sleep(0.01)
    assert Path(f"/proc/{workers[0].pid}").exists(), "the process id stays reserved until the exit code is read"
    workers[0].send_signal(signal.SIGTERM)
    assert [worker.wait(300) for worker in workers] == [3, 3, 3]
    until = time.monotonic() + 10
    while Path(f"/proc/{workers[0].pid}").exists():
        assert time.monotonic() < until, "the worker is not reaped"
        time.sleep(0.01)


def test_signals_reach_the_workers_and_not_the_preload_server(server, tmp_path):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(server.pid, number)
    first = server.start(environment("wait"), tmp_path / "1.out", tmp_path / "1.err")
    os.kill(first.pid, signal.SIGTERM)  # maybe before the worker has restored its handlers
    assert first.wait(300) == -signal.SIGTERM
    second = waiting(server, tmp_path)
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.01)
    assert second.poll() is None
    os.killpg(second.pid, signal.SIGKILL)
    assert second.wait(300) == -signal.SIGKILL
    assert server.ready


def test_a_changed_environment_or_folder_is_refused(server, tmp_path, monkeypatch):
    with pytest.raises(ForkRefused, match=r"^HF_HOME, OMP_NUM_THREADS in the environment changed"):
        server.start(environment("wait", OMP_NUM_THREADS="17", HF_HOME="/x"), None, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ForkRefused, match="working directory"):
        server.start(environment("wait"), None, None)
    assert server.ready


def test_workers_end_with_a_killed_agent(tmp_path):
    output = tmp_path / "out"
    command = [sys.executable, str(HERE / "holder.py"), PROBE, str(output)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as agent:
        server, worker = (int(word) for word in agent.stdout.readline().split())
        wait_for_text(output, "waiting")
        agent.kill()
        killed = time.monotonic()
    while not (gone(server) and gone(worker)):
        assert time.monotonic() - killed < 60
        time.sleep(0.005)
    print(f"gone {1000 * (time.monotonic() - killed):.0f} ms after the agent")


def test_a_forked_worker_records_the_exception_that_ends_it_whatever_hook_the_script_has(server, tmp_path):
    endings = {"an error because of another": (1, "RuntimeError"), "a hook that exits": (9, "KeyError")}
    for probe, (code, kind) in {**endings, "a hook that fails": (1, "KeyError")}.items():
        error_file = tmp_path / f"{probe}.json"
        environ = environment(probe, TORCHELASTIC_ERROR_FILE=str(error_file))
        worker = server.start(environ, tmp_path / "out", tmp_path / "err")
        assert worker.wait(300) == code
        failed = FailedWorker.read(code, error_file, tmp_path / "err")
        assert failed.error.uncaught
        assert {frame.file for frame in failed.error.chain[-1].frames} == {PROBE}
        assert failed.error.chain[-1].type == kind


def test_workers_end_with_a_killed_preload_server_which_is_started_again(tmp_path):
    process = preload_server(PROBE, "SAVE")
    try:
        assert process.wait_ready(120), process.refusal
        worker = waiting(process, tmp_path)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(300) == 17
        worker = waiting(process, tmp_path)
        os.kill(process.pid, signal.SIGKILL)
        assert worker.wait(300) == -signal.SIGKILL
        assert gone(worker.pid)
        assert process.importing
        with pytest.raises(ForkRefused, match="imports are not done"):
            process.start(environment("wait"), None, None)
        assert process.wait_ready(120), "another one has taken its place"
        worker = waiting(process, tmp_path)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(300) == 17
    finally:
        process.close()


def test_closing_ends_the_server_and_its_workers(tmp_path):
    process = preload_server(PROBE)
    assert process.wait_ready(120), process.refusal
    worker = waiting(process, tmp_path)
    process.close()
    assert worker.poll() == -signal.SIGKILL
    assert gone(worker.pid)
    assert gone(process.pid)
    with pytest.raises(ForkRefused, match="closed"):
        process.start(environment("wait"), None, None)


THREADS = """
import threading, time
for i in range(3):
    threading.Thread(target=time.sleep, args=(600,), name=f't{i}', daemon=True).start()
"""
NATIVE_THREAD = """
import ctypes
library, thread = ctypes.CDLL(None), ctypes.c_ulong()
library.pthread_create(ctypes.byref(thread), None, ctypes.cast(library.pause, ctypes.c_void_p), None)
library.pthread_setname_np(thread, b"native_pool")
"""


def installed(folder, **modules):
    """Return an environment in which these modules are installed."""
    site = folder / "site"
    for name, text in modules.items():
        (site / f"{name}-1.dist-info").mkdir(parents=True)
        (site / f"{name}.py").write_text(text)
    return on_path(site)


@pytest.mark.parametrize(
    ("text", "threads"),
    [(THREADS, "3 threads (t0, t1, t2)"), (NATIVE_THREAD, "1 native thread (native_pool)")],
    ids=["python", "native"],
)
def test_a_package_that_starts_threads_is_imported_by_each_worker(text, threads, tmp_path):
    environ = installed(tmp_path, threaded=text, harmless="")
    source = "import sys, threaded, harmless\nprint(list(sys.modules).index('threaded'))\n"
    process = preload_server(script(tmp_path, source), environ=environ)
    try:
        assert process.wait_ready(120), process.refusal
        assert process.excluded == {"threaded": f"threaded started {threads} while it was imported"}
        assert run_forked(process, environ, tmp_path, "worker").code == 0
    finally:
        process.close()


def test_without_torch_nothing_is_gained_by_a_fork(tmp_path, caplog):
    environ = installed(tmp_path, torch=THREADS)
    process = preload_server(script(tmp_path, "import torch\n"), environ=environ)
    try:
        assert not process.wait_ready(120)
        assert process.refusal == "torch started 3 threads (t0, t1, t2) while it was imported"
        with pytest.raises(ForkRefused, match="3 threads"):
            process.start(environ, None, None)
        warnings = [record.getMessage() for record in caplog.records if "3 threads" in record.getMessage()]
        assert len(warnings) == 1
        assert warnings[0].startswith("Workers are started without the preload server")
    finally:
        process.close()


def test_the_script_of_the_first_page_starts_warm_where_pyarrow_is_installed(tmp_path):
    """scikit-learn imports it if pandas is there, which would start a thread of its memory allocator."""
    text = (ROOT / "docs" / "index.md").read_text()
    (source,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "run.epochs" in block)
    assert "sklearn" in source
    check = "import os, sys\nassert 'pyarrow.lib' in sys.modules\nassert 'JE_ARROW_MALLOC_CONF' not in os.environ\n"
    process = preload_server(script(tmp_path, f"{check}sys.exit()\nimport pyarrow\n{source}"))
    try:
        assert process.wait_ready(120), process.refusal
        assert process.excluded == {}
        assert run_forked(process, ENVIRON, tmp_path, "worker").code == 0
    finally:
        process.close()


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch\n", (), "OMP_NUM_THREADS.*before torch"),
        ("import socket\n", ("socket.py",), "socket.py has the name of a module"),
        ("", ("-S",), "No module named"),
        ("", ("-X", "importtime", "-c"), "it has ended"),
    ],
)
def test_an_unsafe_preload_server_refuses_at_once(tmp_path, text, options, reason):
    if options == ("socket.py",):
        (tmp_path / "socket.py").write_text("")
        options = ()
    process = preload_server(script(tmp_path, text), options=options)
    try:
        assert not process.wait_ready(60)
        assert process.refusal is not None

        assert re.search(reason, process.refusal), process.refusal
    finally:
        process.close()


def test_the_end_of_the_agent_is_noticed_in_the_middle_of_an_import(tmp_path, monkeypatch):
    monkeypatch.setattr("azureml_elastic.forks.process._END_SECONDS", 60.0)
    site, importing = tmp_path / "site", tmp_path / "importing"
    (site / "slow-1.dist-info").mkdir(parents=True)
    (site / "slow.py").write_text(f"import time\nopen({str(importing)!r}, 'w').write('yes')\ntime.sleep(600)\n")
    process = preload_server(script(tmp_path, "import slow\n"), environ=on_path(site))
    wait_for_text(importing, "yes")
    assert not process.wait_ready(0.01)
    start = time.monotonic()
    process.close()
    assert time.monotonic() - start < 30
    assert gone(process.pid)


def test_open_devices_are_found():
    with Path("/dev/null").open("rb"):
        assert open_devices(("/dev/nu", "/dev/kfd")) == ["/dev/null"]
    assert open_devices(("/dev/nvidia", "/dev/kfd")) == []


def test_a_missing_interpreter(tmp_path):
    process = PreloadServer(Program(str(tmp_path / "python"), (), "script", PROBE, ()), ENVIRON)
    assert not process.wait_ready(5)
    assert "cannot be started: No such file or directory" in process.refusal
    process.close()


def test_output_without_a_file_is_inherited_from_the_agent(server, tmp_path):
    assert run_forked(server, environment("exit with a text"), tmp_path, "x").stderr == "text for the user\n"
    assert server.start(environment("exit at once"), None, None).wait(300) == 7


def test_packages_that_packages_import_later_are_imported_while_workers_run(tmp_path):
    importers, installed = tmp_path / "importers", tmp_path / "site-packages"
    installed.mkdir()
    (installed / "accelerate.py").touch()
    (installed / "deepspeed.py").write_text("import subprocess\nsubprocess.run(['true'], check=True)\n")
    (installed / "datasets.py").write_text(f"import os\nopen({str(importers)!r}, 'a').write(f'{{os.getpid()}} ')\n")
    environ = {**on_path(installed), "AZUREML_ELASTIC_INTEGRATIONS": "off"}
    server = preload_server(script(tmp_path, "import accelerate, time\ntime.sleep(600)\n"), environ=environ)
    try:
        assert server.wait_ready(300), server.refusal
        worker = server.start(environ, tmp_path / "out", tmp_path / "err")
        wait_for_text(importers, f"{server.pid} ")
        assert worker.poll() is None
    finally:
        server.close()
