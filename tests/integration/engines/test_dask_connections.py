"""The connections of a real Dask cluster: who is let in, and on which ports it listens."""

import asyncio
import contextlib
import os
import socket
import ssl
import subprocess
import sys

import psutil
import pytest

from azureml_elastic.engines.dask import Dask, derive_credentials, tls_context, write_credentials
from azureml_elastic.errors import EngineError
from tests.support.listening import reachable_addresses
from tests.support.waiting import until

pytest.importorskip("distributed", reason="the extra dask is not installed")

HOST = "127.0.0.2"  # Dask's HTTP servers are on 127.0.0.1
WORKERS = 2
KEY, OTHER_KEY = b"k" * 32, b"o" * 32
PROGRAM = """
from distributed import Client
with Client() as client:
    client.wait_for_workers(2, timeout=60)
    print(client.submit(sum, [40, 2]).result())
"""


def free_range(count):
    """Return the bounds of so many free ports in succession, below those that the system chooses."""
    for low in range(20000 + os.getpid() % 5000, 32000, count):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(low, low + count):
                stack.enter_context(socket.create_server((HOST, port)))
            return low, low + count - 1
    raise AssertionError("no free ports")


@pytest.fixture(scope="module")
def ports():
    return free_range(2 * WORKERS + 2)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory, ports):
    """A node with a scheduler and workers, one port of whose range is taken, and the scheduler's address."""
    dask = Dask(HOST, WORKERS, 1, str(tmp_path_factory.mktemp("agent")), ports)
    dask.use_key(KEY)
    member = None
    with socket.create_server((HOST, ports[0])):
        try:
            address = dask.start_head()
            member = dask.start_member(address)
            until(lambda: len(listening()) == 2 * WORKERS + 1)
            yield dask, address
        finally:
            if member is not None:
                member.stop(0)
            dask.stop_head()


def listening():
    """Return the ports of the node's own address on which processes of this one listen."""
    addresses = reachable_addresses()
    assert {address for address, _ in addresses} <= {HOST}
    return {port for _, port in addresses}


def reached(scheme, contexts):
    """Return by context whether each of the node's ports lets a client in, with Dask's own protocol."""
    from distributed.comm import connect

    async def one(port, context):
        try:
            comm = await connect(f"{scheme}://{HOST}:{port}", timeout=3, ssl_context=context)
        except OSError:
            return False
        await comm.close()
        return True

    async def all_():
        return [await asyncio.gather(*(one(port, context) for port in listening())) for context in contexts]

    return [set(each) for each in asyncio.run(all_())]


def contexts_of(key, folder):
    """Return the context of a client with these credentials, and that of one that accepts any server."""
    path = write_credentials(derive_credentials(key, "dask"), str(folder), "dask")
    credulous = tls_context(path)
    credulous.verify_mode = ssl.CERT_NONE
    return [tls_context(path), credulous]


def test_the_program_needs_nothing_but_its_environment(cluster):
    dask, address = cluster
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **dask.variables(address)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "42\n", done.stderr
    assert address.startswith("tls://")


def test_a_stranger_without_credentials_or_with_those_of_another_run_is_let_in_nowhere(cluster, tmp_path):
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname = False
    anonymous.verify_mode = ssl.CERT_NONE
    assert reached("tls", contexts_of(KEY, tmp_path)) == [{True}] * 2
    assert reached("tls", [anonymous, *contexts_of(OTHER_KEY, tmp_path)]) == [{False}] * 3
    assert reached("tcp", [None]) == [{False}]


def test_all_ports_of_the_node_are_in_the_range_beside_one_that_is_taken(cluster, ports):
    assert listening() == set(range(ports[0] + 1, ports[1] + 1))


def test_no_command_line_and_no_variable_holds_the_key(cluster):
    pem = derive_credentials(KEY, "dask").decode()
    secrets = (KEY.decode(), KEY.hex(), *pem.split("-----")[2].split())
    for process in psutil.Process().children(recursive=True):
        try:
            shown = str((process.cmdline(), process.environ()))
        except psutil.NoSuchProcess:  # of an earlier test, and ended
            continue
        assert [secret for secret in secrets if secret in shown] == []


def test_a_cluster_keeps_its_credentials_when_the_run_has_another_key(cluster, tmp_path):
    dask, address = cluster
    before = dask.variables(address)
    dask.use_key(OTHER_KEY)
    assert dask.variables(address) == before
    assert dask.variables("tls://127.0.0.3:1") != {**before, "DASK_SCHEDULER_ADDRESS": "tls://127.0.0.3:1"}


def test_without_a_key_there_is_no_cluster(tmp_path):
    with pytest.raises(EngineError, match="no key of the run"):
        Dask(HOST, 1, 1, str(tmp_path)).use_key(b"")


def test_a_range_whose_ports_are_all_taken_is_named(tmp_path):
    low, high = free_range(2)
    dask = Dask(HOST, 1, 1, str(tmp_path), (low, high))
    dask.use_key(KEY)
    with (
        socket.create_server((HOST, low)),
        socket.create_server((HOST, high)),
        pytest.raises(EngineError, match=f"All 2 ports of port_range={low}-{high} are taken on {HOST}"),
    ):
        dask.start_head()
