"""Health checks of a joining node, against real disks, sockets, tables and processes."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path

import pytest

from azureml_elastic.config import ElasticResources, HealthPolicy, Plan, TableRendezvous
from azureml_elastic.config.exit_codes import UNHEALTHY
from azureml_elastic.environment import names as variables
from azureml_elastic.environment.node import NodeEnvironment
from azureml_elastic.errors import NodeLeaving
from azureml_elastic.ledger.events import HealthChecked, HostQuarantined, HostStruck, read_event
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.sentences import describe
from azureml_elastic.memory import available_memory
from azureml_elastic.node.core.round import Member, Round
from azureml_elastic.node.diagnostics.admission import Admission
from azureml_elastic.node.diagnostics.checks.accelerator import check_ecc, check_gpus, examine
from azureml_elastic.node.diagnostics.checks.machine import (
    check_folder,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from azureml_elastic.node.diagnostics.checks.network import check_clock, check_hub, check_peers
from azureml_elastic.node.diagnostics.findings import Check, CheckRunner, DiagnosticReport, Finding
from azureml_elastic.node.diagnostics.node_checks import check_folders, node_checks
from azureml_elastic.node.failures.host_strikes import STRIKE_PREFIX, HostStrikes
from azureml_elastic.node.rendezvous.row_keys import ROUND_KEY
from azureml_elastic.node.rendezvous.table_heartbeat import TABLE_HEARTBEAT_KEY
from azureml_elastic.node.table import open_table
from azureml_elastic.node.table.server_time import ServerClock
from tests.support.listening import silent_port

MIB = 1 << 20
OF_THIS_MACHINE = {"shared memory", "open files"}
"""Findings that are warnings where a test runs in a small container."""


@pytest.fixture(params=["sqlite", "azurite"])
def table(request, tmp_path):
    if request.param == "sqlite":
        rendezvous = TableRendezvous(endpoint=str(tmp_path / "table.sqlite"))
    else:
        rendezvous = TableRendezvous(endpoint=request.getfixturevalue("azurite").endpoint, table=f"t{uuid.uuid4().hex}")
    opened = open_table(rendezvous, "run", NodeEnvironment.read({}))
    yield opened
    opened.close()


@pytest.fixture
def local_table(tmp_path):
    opened = open_table(TableRendezvous(endpoint=str(tmp_path / "table.sqlite")), "run", NodeEnvironment.read({}))
    yield opened
    opened.close()


@contextlib.contextmanager
def listening(host="127.0.0.1"):
    with socket.create_server((host, 0)) as server:
        yield server.getsockname()[1]


def refusing():
    """Return a port of this machine at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def hanging(folder, node):
    """A folder in which opening the check's file hangs as on a dead mount: the file is a pipe that nobody reads."""
    folder.mkdir(exist_ok=True)
    pipe = folder / f".azureml-elastic-health-{node}"
    os.mkfifo(pipe)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))  # releases the blocked reader


def wait_for_answer(name):
    """Return when the probe of this name has looked."""
    for thread in threading.enumerate():
        if thread.name == f"health {name}":
            thread.join(60)


def find(report, name):
    (finding,) = [finding for finding in report.findings if finding.name == name]
    return finding


def assert_found(finding, status, *parts):
    """Check the status of a finding, and that its text has all parts."""
    assert finding.status == status, finding
    assert [part for part in parts if part not in str(finding)] == [], finding


# --- gathering


def probe(name, look, limit=60.0, late="fail"):
    return Check(name, look, limit, Finding(name, late, "", "an answer", "Look at it."))


def test_probes_run_side_by_side_and_keep_their_order():
    gate = threading.Barrier(4, timeout=60)

    def meet(name):
        def look():
            gate.wait()
            return Finding(name, "ok", "met")

        return look

    report = CheckRunner([probe(str(index), meet(str(index))) for index in range(4)]).wait()
    assert [finding.name for finding in report.findings] == ["0", "1", "2", "3"]
    assert report.status == "ok"
    assert not report.failed


def test_a_probe_that_hangs_is_left_behind_and_one_that_raises_is_a_warning():
    release = threading.Event()

    def hang():
        release.wait(60)
        return Finding("hangs", "ok", "too late")

    def wrong():
        raise ValueError("broken probe")

    started = time.monotonic()
    report = CheckRunner([probe("hangs", hang, 0.2), probe("raises", wrong)]).wait()
    assert time.monotonic() - started < 30
    release.set()
    assert find(report, "hangs") == Finding("hangs", "fail", "no answer within 0.2 s", "an answer", "Look at it.")
    assert find(report, "raises").status == "warn"
    assert "broken probe" in find(report, "raises").value
    assert report.failed


def test_a_finding_that_exists_when_it_is_read_is_never_late():
    done = threading.Event()

    def slow():
        done.wait(0.3)
        return Finding("slow", "ok", "there")

    check = CheckRunner([probe("slow", slow, 0.05)])
    wait_for_answer("slow")  # the agent is busy importing
    assert check.wait().status == "ok"


def test_a_report_contains_the_advice():
    report = DiagnosticReport((Finding("a", "ok", "1"), Finding("b", "warn", "2", "3", "Do it.")), 0.5)
    assert report.lines("warn", "fail") == ("b: 2 (wanted: 3). Do it.",)
    text = report.text()
    assert re.search(r"^b +warn +2 .wanted: 3.$", text, re.MULTILINE)
    assert text.endswith("\n         Do it.")
    assert DiagnosticReport().status == "ok"


# --- this machine


LEFT = ".azureml-elastic-health-n"
"""The file of the check of a folder."""


def free_mib(folder):
    space = os.statvfs(folder)
    return space.f_bavail * space.f_frsize // MIB


def planted_link(folder):
    victim = folder / "victim"
    victim.write_text("precious")
    (folder / LEFT).symlink_to(victim)
    yield check_folder("run", folder, "n", 0)
    assert victim.read_text() == "precious"


def left_file(folder):
    (folder / LEFT).write_bytes(b"x" * 9000)
    yield check_folder("run", folder, "n", 0)
    assert list(folder.iterdir()) == []


def new_folder(folder):
    yield check_folder("run", folder / "new" / "folder", "n", 0)
    assert list((folder / "new" / "folder").iterdir()) == []


def file_for_a_folder(folder):
    (folder / "file").write_text("x")
    yield check_folder("run", folder / "file", "n", 0)


def own_port(host):
    with listening() as port:
        yield check_hub(host, port)


SOFT, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
MACHINES = {
    "new folder": (new_folder, "ok", "MiB free, written and read in"),
    "too little space": (lambda folder: [check_folder("run", folder, "n", 2 * free_mib(folder))], "fail"),
    "little space": (
        lambda folder: [check_folder("run", folder, "n", int(free_mib(folder) / 1.5))],
        "warn",
        "{folder}",
    ),
    "file for a folder": (file_for_a_folder, "fail", "FileExistsError"),
    "planted link": (planted_link, "fail"),
    "file of a killed check": (left_file, "ok"),
    "memory": (lambda _: [check_memory(0)], "ok"),
    "no memory": (lambda _: [check_memory(1 << 30)], "fail"),
    "little memory": (lambda _: [check_memory(int(available_memory()[0] / MIB / 1.5))], "warn"),
    "shared memory": (lambda _: [check_shared_memory(0)], "ok"),
    "little shared memory": (lambda _: [check_shared_memory(1 << 40)], "warn", "shm_size"),
    "no shared memory": (lambda _: [check_shared_memory(0, Path("/dev/nowhere"))], "warn"),
    "open files": (lambda _: [check_open_files(SOFT)], "ok"),
    "few open files": (lambda _: [check_open_files(SOFT + 1)], "warn"),
    "own port": (lambda _: own_port("127.0.0.1"), "ok"),
    # An address that reaches this machine but not this port: another loopback address.
    "own port elsewhere": (lambda _: own_port("127.0.0.2"), "warn", variables.LOCAL_ADDRESS),
    "own port closed": (lambda _: [check_hub("127.0.0.1", refusing())], "fail", "refused"),
    "device": (lambda _: check_gpus(1, 200, device="cpu"), "ok", "gpu cpu"),
    "no tool": (lambda _: check_ecc(5) or [Finding("tool", "ok", "absent")], "ok", "absent"),
}


@pytest.mark.parametrize("machine", MACHINES)
def test_what_is_found_on_a_machine(machine, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # without the driver's tool
    look, status, *parts = MACHINES[machine]
    for finding in look(tmp_path):
        assert_found(finding, status, *(part.format(folder=tmp_path) for part in parts))
    torch = sys.modules.get("torch")
    assert torch is None or not torch.cuda.is_initialized(), "the process that computes is another one"


def run_check(*arguments, preexec=None, prefix=(), **environ):
    command = [*prefix, sys.executable, "-m", "azureml_elastic.node.diagnostics.health", *map(str, arguments)]
    return subprocess.run(
        command,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=preexec,
        check=False,
    )


def test_a_limit_on_files_is_found_by_the_command(tmp_path):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))

    # Else Python would leave compiled modules that end after 1 KiB, which no later process can import.
    done = run_check("--folder", tmp_path / "here", preexec=limit, PYTHONDONTWRITEBYTECODE="1")
    assert done.returncode == 1, done.stderr
    assert re.search(r"fail +OSError: \[Errno 27\]", done.stdout)


def in_namespace(script, folder):
    """A shell of its own mount namespace that prepares a mount and then runs the check."""
    if shutil.which("unshare") is None:
        pytest.skip("no unshare on this machine")
    prefix = ["unshare", "-Urm", "sh", "-c", f'{script} && exec "$@"', "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True, check=False, timeout=60).returncode:
        pytest.skip("this machine lets nobody mount")
    return prefix


@pytest.mark.parametrize(
    ("mount", "said"),
    [
        ("-o size=64k none {0} && {{ head -c 65536 /dev/zero > {0}/x || true; }}", "No space left on device"),
        ("-o ro none {0}", "Read-only file system"),
        ("-o size=8m none {0}", "fail +[78] MiB free"),
    ],
    ids=["full", "read-only", "small"],
)
def test_a_mount_that_takes_no_files_fails(tmp_path, mount, said):
    prefix = in_namespace(f"mount -t tmpfs {mount.format(tmp_path)}", tmp_path)
    done = run_check("--folder", tmp_path, prefix=prefix)
    assert done.returncode == 1, done.stderr
    assert re.search(said, done.stdout)


def test_a_mount_that_hangs_does_not_hang_the_check(tmp_path):
    folder = tmp_path / "mount"
    with hanging(folder, "n"):
        started = time.monotonic()
        check = CheckRunner(
            node_checks(HealthPolicy(), node="n", folders={"run": folder, "other": tmp_path}, quick=0.2)
        )
        wait_for_answer("disk: other")
        report = check.wait()
        assert time.monotonic() - started < 30
    assert find(report, "disk: run").status == "fail"
    assert find(report, "disk: run").value == "no answer within 1 s"
    assert "mount" in find(report, "disk: run").advice
    assert find(report, "disk: other").status == "ok"


def test_a_container_of_the_second_generation_limits_memory(tmp_path):
    inner = tmp_path / "cgroup" / "pod" / "container"
    inner.mkdir(parents=True)
    listing = tmp_path / "listing"
    listing.write_text("0::/pod/container\n")
    for folder, limit, usage, inactive in ((inner, "max", 1, 0), (inner.parent, 100 * MIB, 90 * MIB, 50 * MIB)):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{usage}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive}\n")
    assert available_memory(tmp_path / "cgroup", listing) == (60 * MIB, True)


def test_a_container_of_the_first_generation_whose_path_is_the_hosts(tmp_path):
    top = tmp_path / "cgroup" / "memory"
    top.mkdir(parents=True)
    listing = tmp_path / "listing"
    listing.write_text("5:cpu:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    (top / "memory.limit_in_bytes").write_text(f"{80 * MIB}\n")
    (top / "memory.usage_in_bytes").write_text(f"{30 * MIB}\n")
    (top / "memory.stat").write_text("cache 5\n")
    assert available_memory(tmp_path / "cgroup", listing) == (50 * MIB, True)
    (top / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_memory(tmp_path / "cgroup", listing)[1] is False
    assert available_memory(tmp_path / "cgroup", tmp_path / "missing")[1] is False


# --- clock, port, peers


@pytest.mark.parametrize(
    ("off", "status", "said"),
    [(0, "ok", "0."), (-120, "warn", "behind"), (120, "warn", "ahead"), (1200, "fail", "ahead")],
)
def test_the_clock_is_compared_with_the_servers(table, off, status, said):
    assert_found(check_clock(ServerClock(table, "n", wall=lambda: time.time() + off)), status, said)


def seal_round(table, *ports):
    members = tuple(
        Member(f"node-{index}", "i", round=3, host="127.0.0.1", hub_port=port) for index, port in enumerate(ports)
    )
    table.insert(ROUND_KEY, Round(3, "sealed", members).to_value())


def peers(table, node="me", interval=5.0):
    return check_peers(table, ServerClock(table, node), node, timedelta(seconds=interval))


def test_without_a_running_round_no_peer_is_checked(local_table):
    assert peers(local_table).status == "ok"
    seal_round(local_table, refusing())
    assert peers(local_table, node="node-0").status == "ok", "its own former round"


def test_a_hub_that_accepts_or_refuses_can_be_reached(local_table, monkeypatch):
    monkeypatch.setattr("azureml_elastic.node.diagnostics.checks.network._CONNECT_SECONDS", 30.0)
    with listening() as port:
        seal_round(local_table, port)
        assert_found(peers(local_table), "ok", "accepts")
    assert_found(peers(local_table), "ok", "refuses")


def test_an_unreachable_hub_fails_only_while_the_round_is_alive(table):
    with silent_port() as port:
        seal_round(table, port)
        assert_found(peers(table), "warn", "node-0 at 127.0.0.1")  # no sign of life
        table.insert(TABLE_HEARTBEAT_KEY, {"round": 3, "beats": 1})
        assert_found(peers(table), "fail", "sign of life", variables.LOCAL_ADDRESS)
        assert_found(peers(table, interval=0.001), "warn")  # the sign is old


def test_a_reachable_member_makes_an_unreachable_hub_a_warning(local_table, monkeypatch):
    monkeypatch.setattr("azureml_elastic.node.diagnostics.checks.network._CONNECT_SECONDS", 4.0)
    local_table.insert(TABLE_HEARTBEAT_KEY, {"round": 3, "beats": 1})
    with silent_port() as first, listening() as second:
        seal_round(local_table, first, second)
        assert_found(peers(local_table), "warn", "other members")


def test_the_whole_check_of_a_healthy_node_waits_for_no_limit(table, tmp_path, monkeypatch):
    monkeypatch.setattr("azureml_elastic.node.diagnostics.checks.network._CONNECT_SECONDS", 60.0)
    with listening() as port:
        seal_round(table, port)
        probes = node_checks(
            HealthPolicy(disk_mib=0),
            quick=60.0,
            node="me",
            folders=check_folders(tmp_path, str(tmp_path / "checkpoints")),
            table=table,
            clock=ServerClock(table, "me"),
            hub=("127.0.0.1", port),
        )
        report = CheckRunner(probes).wait()
    assert report.seconds < 30
    assert {finding.name for finding in report.findings if finding.status != "ok"} <= OF_THIS_MACHINE, report.text()
    assert len(report.findings) == 9


def test_an_unavailable_table_does_not_prevent_joining(local_table, tmp_path):
    from azureml_elastic.errors import TableUnavailable

    class Away:
        def __getattr__(self, name):
            def call(*_):
                raise TableUnavailable("The table is away")

            return call

    probes = node_checks(
        HealthPolicy(), quick=1.0, node="me", folders={}, table=Away(), clock=ServerClock(Away(), "me")
    )
    report = CheckRunner(probes).wait()
    assert find(report, "clock").status == find(report, "peers").status == "warn"
    assert not report.failed


def test_the_strikes_are_read_with_the_check(local_table):
    strikes = HostStrikes(local_table, "host-1", "n", ServerClock(local_table, "n"))
    checks = node_checks(HealthPolicy(quarantine_strikes=1), node="n", folders={}, strikes=strikes, quick=60.0)
    check = CheckRunner(checks)
    assert str(find(check.wait(), "strikes")) == "strikes: 0 against host-1 (wanted: fewer than 1)"
    strikes.strike("host-1", "went silent", "round.000001")
    strikes.close()
    finding = find(CheckRunner(checks).wait(), "strikes")
    assert (finding.status, finding.value) == ("warn", "1 against host-1")


def test_equal_folders_are_written_to_once(tmp_path):
    assert list(check_folders(tmp_path, str(tmp_path))) == ["run's folder", "temporary files"]
    assert next(iter(check_folders(tmp_path, None).values())) == tmp_path


# --- GPUs


def test_the_computation_is_exact_on_a_device_that_computes():
    assert examine("cpu")["error"] == ""


def test_a_device_that_is_not_there_is_an_error_not_an_exception():
    assert examine("no-such-device")["error"] != ""


def test_fewer_gpus_than_the_driver_lists_fail():
    torch = pytest.importorskip("torch")

    seen = torch.cuda.device_count()
    assert_found(check_gpus(seen + 1, 200)[0], "fail", f"torch sees {seen} of {seen + 1}")


def test_a_gpu_that_does_not_answer_fails_in_time(monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    started = time.monotonic()
    (finding,) = check_gpus(1, 0.05, device="cpu")
    assert time.monotonic() - started < 30
    assert (finding.status, finding.value) == ("fail", "no answer within 0.05 s")


def test_the_process_ends_itself_after_its_time_limit():
    module = "azureml_elastic.node.diagnostics.checks.accelerator"
    command = [sys.executable, "-m", module, "--device", "cpu", "--seconds", "1"]
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)
    # Nobody reads, so that the process hangs in its last write, as in a call to a broken driver.
    with subprocess.Popen(command, stdout=writing, stderr=subprocess.DEVNULL) as process:
        code = process.wait(60)
    os.close(reading)
    os.close(writing)
    assert code == -signal.SIGALRM


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put a program of the name of the driver's tool first in the path."""

    def make(body):
        path = tmp_path / "bin" / "nvidia-smi"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{path.parent}{os.pathsep}{os.environ['PATH']}")

    return make


def test_memory_errors_are_counted_by_the_drivers_tool(tool):
    tool('case "$1" in *ecc.errors.uncorrected.volatile.total*) printf "0, 0\\n1, 3\\n2, [N/A]\\n";; esac')
    findings = check_ecc(60)
    assert [(finding.name, finding.status) for finding in findings] == [
        ("gpu 0 memory errors", "ok"),
        ("gpu 1 memory errors", "fail"),
    ]


@pytest.mark.parametrize(
    ("body", "seconds", "status", "said"),
    [
        ("echo 'NVIDIA-SMI has failed'; exit 9", 60, "warn", "exit code 9: NVIDIA-SMI has failed"),
        ("exec sleep 60", 0.2, "fail", "no answer within 0.2 s"),
    ],
)
def test_a_tool_that_fails_warns_and_one_that_hangs_fails(tool, body, seconds, status, said):
    tool(body)
    started = time.monotonic()
    (finding,) = check_ecc(seconds)
    assert_found(finding, status, said)
    assert time.monotonic() - started < 30


# --- admission


class Node:
    """A node whose disk the test breaks and mends, with real strikes; the pause is the test's, and the clock may be."""

    def __init__(self, table, folder, **policy):
        self.folder = folder
        self.policy = HealthPolicy(**{"disk_mib": 0} | policy)
        self.table = table
        self.strikes = HostStrikes(table, "host-1", "n", ServerClock(table, "n"))
        self.reports, self.away, self.pauses, self.paused = [], [], 0, 0.0
        self.when_paused = lambda: None

    def admission(self, **more):
        checks = node_checks(self.policy, node="n", folders={"run": self.folder})
        return Admission(self.policy, checks, self.table, self.strikes, "abc", self, **more)

    def record_health(self, report):
        self.reports.append(report)

    def stay_away(self, reason):
        self.away.append(reason)

    def pause(self, seconds):
        self.pauses += 1
        self.when_paused()
        self.paused += seconds

    def monotonic(self):
        return self.paused

    def rows(self):
        self.strikes.close()
        return list(self.table.query(STRIKE_PREFIX))


@pytest.fixture
def node(local_table, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "azureml_elastic.node.failures.host_strikes._FLUSH_SECONDS", 60.0
    )  # what is to be written is waited for
    made = []

    def make(**policy):
        made.append(Node(local_table, tmp_path / "folder", **policy))
        return made[-1]

    yield make
    for one in made:
        one.strikes.close()


def ends(node, at, state):
    """Have the run end in the node's pause of this number."""

    def end():
        if node.pauses == at:
            node.table.insert(ROUND_KEY, Round(4, state).to_value())

    return end


def unlink(node):
    return node.folder.unlink


@pytest.mark.parametrize(
    ("policy", "ill", "when_paused", "stay", "reports", "pauses"),
    [
        ({}, False, None, False, [False], 0),
        ({"check": False}, True, None, False, [], 0),
        ({}, True, unlink, False, [True, False], 1),
        # The end of the run lets a node through to learn of it.
        ({}, True, lambda node: ends(node, 1, "succeeded"), False, [True], 1),
        ({}, True, lambda node: ends(node, 40, "failed"), True, [True], 40),
    ],
    ids=["well", "switched off", "recovers", "run ends", "exit would end the job"],
)
def test_a_node_is_let_in(node, policy, ill, when_paused, stay, reports, pauses):
    one = node(**policy)
    if ill:
        one.folder.write_text("no folder")
    if when_paused:
        one.when_paused = when_paused(one)
    assert one.admission(stay=stay).wait() is True
    assert [report.failed for report in one.reports] == reports
    assert (one.pauses, len(one.away)) == (pauses, int(True in reports))
    assert len(one.rows()) == (reports == [True])  # a single failed check is no strike


def test_a_node_that_stays_ill_strikes_its_host_once_and_is_turned_away(node, monkeypatch):
    ill = node()
    monkeypatch.setattr("azureml_elastic.node.diagnostics.admission.time", ill)
    ill.folder.write_text("no folder")
    assert ill.admission().wait() is False
    assert len(ill.away) == 1
    assert "failed its health check: disk: run" in ill.away[0]
    assert len(ill.reports) == 1, "the same report is recorded once"
    assert (ill.pauses, ill.paused) == (30, 300.0)
    (row,) = ill.rows()
    assert (row.key, row.value["host"]) == (f"{STRIKE_PREFIX}host-1.health.abc", "host-1")
    assert UNHEALTHY == 69


def test_a_notice_ends_the_wait(node):
    ill = node()
    ill.folder.write_text("no folder")

    def preempted():
        raise NodeLeaving("asked to leave")

    ill.when_paused = preempted
    with pytest.raises(NodeLeaving):
        ill.admission().wait()


# --- the command, the policy, the ledger


def test_the_command_prints_the_findings_and_its_exit_code_is_the_result(tmp_path):
    plan = Plan(
        resources=ElasticResources(max_instance_count=2),
        health=HealthPolicy(disk_mib=0),
        rendezvous=TableRendezvous(endpoint=str(tmp_path / "table.sqlite")),
        name="run",
    )
    environ = {variables.PLAN: plan.to_json(), variables.RUN_DIR: str(tmp_path / "run")}
    done = run_check(**environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^clock +ok +0\.\d s", done.stdout, re.MULTILINE)
    assert re.search(r"^peers +ok", done.stdout, re.MULTILINE)
    assert re.search(r"^(ok|warn) after \d+\.\d\d s$", done.stdout.strip().splitlines()[-1])
    opened = open_table(plan.rendezvous, "run", NodeEnvironment.read({}))
    assert list(opened.query("")) == [], "a look leaves nothing behind"
    opened.close()


def test_the_command_refuses_a_plan_that_it_cannot_read():
    done = run_check(**{variables.PLAN: "{}"})
    assert done.returncode == 2
    assert "version None" in done.stderr


def test_the_ledger_and_its_readers_know_the_events():
    events = [
        HealthChecked(time=1, node="n", status="fail", seconds=0.1, problems=("disk: run: full",)),
        HealthChecked(time=2, node="n", status="ok", seconds=0.1),
        HostStruck(time=3, node="n", host="h", reason="went silent"),
        HostQuarantined(time=4, node="n", host="h", strikes=2),
    ]
    assert [read_event(event.model_dump_json()) for event in events] == events
    assert [event.rare for event in events] == [True, False, True, True]
    states = [Picture.of(events[: count + 1]).now.nodes[0].state for count in range(len(events))]
    assert states == ["unhealthy", "preparing", "preparing", "quarantined"]
    texts = [describe(event) for event in events]
    assert texts[0] == "n is unhealthy: disk: run: full"
    assert texts[1] is None
    assert "went silent" in texts[2]
    assert "2 strikes" in texts[3]
