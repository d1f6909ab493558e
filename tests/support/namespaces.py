"""Network namespaces, one for each node of a run: machines on one switch, between which packets can be lost."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence

import pytest

NOWHERE = "02:00:00:00:00:99"  # the hardware address of nobody


def run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@functools.cache
def why_not() -> str | None:
    """Return why this machine cannot make networks, ``None`` if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not shutil.which("ip"):
        return "network namespaces need the command ip (iproute2)"
    name = f"ae-try-{secrets.token_hex(3)}"
    try:
        run("ip", "netns", "add", name)
        try:
            run("ip", "link", "add", f"{name[-6:]}v", "type", "veth", "peer", "name", "eth0", "netns", name)
            run("ip", "link", "add", f"{name[-6:]}b", "type", "bridge")
            run("ip", "link", "del", f"{name[-6:]}b")
        finally:
            run("ip", "netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"this machine makes no network namespaces: {error.stderr.strip()}"
    return None


class Namespaces:
    """A namespace for each of these nodes; the test is skipped where the machine makes none.

    Args:
        names: names of the nodes, whose last characters differ.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if (reason := why_not()) is not None:
            pytest.skip(reason)
        self.id = secrets.token_hex(2)
        self.subnet = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250) + 1}"
        self.addresses = {name: f"{self.subnet}.{number + 11}" for number, name in enumerate(names)}
        self.stack = contextlib.ExitStack()

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            bridge = f"ae{self.id}"
            run("ip", "link", "add", bridge, "type", "bridge")
            stack.callback(run, "ip", "link", "del", bridge)
            run("ip", "addr", "add", f"{self.subnet}.1/24", "dev", bridge)
            run("ip", "link", "set", bridge, "up")
            for name, address in self.addresses.items():
                space, port = self.space(name), f"ae{self.id}{name[-1]}"
                run("ip", "netns", "add", space)
                stack.callback(run, "ip", "netns", "del", space)
                run("ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", space)
                run("ip", "link", "set", port, "master", bridge, "up")
                self.within(name, "ip", "addr", "add", f"{address}/24", "dev", "eth0")
                for link in ("eth0", "lo"):
                    self.within(name, "ip", "link", "set", link, "up")
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_):
        self.stack.close()

    def space(self, name: str) -> str:
        """Return the namespace of a node."""
        return f"ae{self.id}-{name}"

    def within(self, name: str, *command: str) -> str:
        """Run a command in the namespace of a node."""
        return run("ip", "netns", "exec", self.space(name), *command)

    def cut(self, here: str, there: str) -> None:
        """Lose what one node sends to another one."""
        neighbour = ("to", self.addresses[there], "lladdr", NOWHERE, "dev", "eth0", "nud", "permanent")
        self.within(here, "ip", "neigh", "replace", *neighbour)

    def mend(self, here: str, there: str) -> None:
        """Deliver it again."""
        self.within(here, "ip", "neigh", "del", self.addresses[there], "dev", "eth0")
