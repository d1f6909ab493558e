"""Probes of what lies between this node and the others: the clock that tokens are judged by, ports, peers."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

from azureml_elastic.config import HealthPolicy
from azureml_elastic.config.environment import LOCAL_ADDRESS
from azureml_elastic.node.diagnostics.findings import Check, CheckRunner, Finding, Status
from azureml_elastic.node.rendezvous.state.round import Member, Round
from azureml_elastic.node.rendezvous.state.row_keys import ROUND_KEY
from azureml_elastic.node.rendezvous.table_heartbeat import TABLE_HEARTBEAT_KEY
from azureml_elastic.node.table import Table
from azureml_elastic.node.table.server_time import ServerClock

__all__ = ["check_clock", "check_hub", "check_peers"]

_CONNECT_SECONDS = 1.2
"""Long enough for the second attempt of TCP, which follows the first after a second."""

_PEERS = 3

_ALIVE_INTERVALS = 3
"""A round whose sign of life is older than this many intervals may be dead, and nobody is to blame for not reaching
it."""

_ADVICE = (
    "Allow TCP between the nodes (port_range= of TableRendezvous limits the ports), or set its advertise=, or on this "
    f"node {LOCAL_ADDRESS}, to an address that the others can reach (docs/how-to/network.md)."
)


def check_clock(clock: ServerClock, policy: HealthPolicy) -> Finding:
    """Compare this machine's clock with the table server's: tokens are refused where they are far apart.

    Raises:
        TableError, UsageError: the table cannot be asked.
    """
    assert policy.clock_skew is not None, "the check is switched off"
    skew = clock.reading().skew
    fail, warn = policy.clock_skew.total_seconds(), policy.clock_skew_warning.total_seconds()
    value = f"{abs(skew):.1f} s {'behind' if skew < 0 else 'ahead of'} the table's server"
    limit = f"at most {fail:g} s, better {warn:g} s"
    if abs(skew) <= warn:
        return Finding("clock", "ok", value, limit)
    status: Status = "fail" if abs(skew) > fail else "warn"
    return Finding("clock", status, value, limit, "Have the machine take its time from a server (chrony, timesyncd).")


def check_hub(host: str, port: int) -> Finding:
    """Connect to this node's own port, as the other nodes will."""
    name, limit = "own port", "accepts a connection"
    try:
        _connect(host, port)
    except OSError as error:
        said = f"{host}:{port}: {error}"
    else:
        return Finding(name, "ok", f"{host}:{port} accepts", limit)
    try:
        _connect("::1" if ":" in host else "127.0.0.1", port)
    except OSError:
        advice = "Something on this machine, perhaps a firewall, keeps processes from accepting connections."
        return Finding(name, "fail", said, limit, advice)
    return Finding(name, "warn", f"{said}; it accepts on the loopback address", limit, _ADVICE)


def check_peers(table: Table, clock: ServerClock, node: str, table_heartbeat_interval: timedelta) -> Finding:
    """Connect to members of the running round, if there is one.

    Only a round that is known to be alive proves a fault of this node. That follows from the server's times alone: of
    the heartbeat row, and of a row that this node has just written.

    Args:
        table: table of the run.
        clock: tells the server's time.
        node: this node's name.
        table_heartbeat_interval: interval between two table heartbeats of rank 0's node.

    Raises:
        TableError, UsageError: the table cannot be asked.
    """
    name, limit = "peers", "rank 0's node accepts a connection"
    row = table.get(ROUND_KEY)
    round_ = Round.from_value(row.value) if row is not None else Round()
    members = [member for member in round_.members if member.node != node][:_PEERS]
    if round_.state != "sealed" or not members:
        return Finding(name, "ok", "no round of other nodes is running", limit)
    report = CheckRunner([_call(member) for member in members]).wait()
    first, *others = report.findings
    if first.status == "ok":
        return Finding(name, "ok", str(first), limit)
    if any(finding.status == "ok" for finding in others):
        return Finding(name, "warn", f"{first}; but other members can be reached", limit, _ADVICE)
    heartbeat = table.get(TABLE_HEARTBEAT_KEY)
    age = clock.now() - heartbeat.timestamp if heartbeat is not None else timedelta.max
    if age < _ALIVE_INTERVALS * table_heartbeat_interval:
        value = f"{first}; round {round_.number} gave a sign of life {age.total_seconds():.0f} s ago"
        return Finding(name, "fail", value, limit, _ADVICE)
    return Finding(name, "warn", f"{first}; round {round_.number} may have ended", limit, _ADVICE)


def _call(member: Member) -> Check:
    where = f"{member.node} at {member.host}:{member.hub_port}"

    def look() -> Finding | Sequence[Finding]:
        try:
            _connect(member.host, member.hub_port)
        except ConnectionRefusedError:
            # The way there is free; whether that node is gone is the rendezvous's business.
            return Finding(where, "ok", "refuses, so that it is reached")
        except OSError as error:
            return Finding(where, "fail", f"{type(error).__name__}: {error}")
        return Finding(where, "ok", "accepts")

    return Check(where, look, _CONNECT_SECONDS, Finding(where, "fail", ""))


def _connect(host: str, port: int) -> None:
    with socket.create_connection((host, port), _CONNECT_SECONDS):
        pass
