"""What tests of several packages need, and the way to what lies beside them."""

import gc
import os
import signal
import sys
from importlib.metadata import version

import pytest
from hypothesis import settings

from azureml_elastic.local.azurite import Azurite
from tests.support.campaign import table_of

pytest_plugins = ["tests.support.costs.plugin"]
pytest.register_assert_rewrite("tests.support.observed")

# A shell that starts the tests in the background makes them ignore Ctrl-C, which some of them test.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests and what they import stay: to search them for garbage again and again takes a quarter of the collection's time.
gc.disable()

# Explore at home, repeat in CI: a failure there must be the change's own.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("home", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "home")


@pytest.fixture(scope="session")
def azurite():
    """The table service's real emulator on a free port."""
    with Azurite() as emulator:
        yield emulator


FIRST = ("stacks", "trainers", "runs", "integration")

NOT_SHARDED = pytest.mark.skipif(
    version("torch").startswith("2.6."), reason="FSDP2 of torch 2.6 fails on CPUs: its Stream has no record_event()"
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Begin with whole runs, which take longest; keep tests that share a module's fixture in one process."""
    items.sort(key=lambda item: next((at for at, name in enumerate(FIRST) if name in item.path.parts), len(FIRST)))
    for item in items:
        fixtures = item._fixtureinfo.name2fixturedefs.values()
        shares = any(definitions[-1].scope == "module" for definitions in fixtures)
        if shares and not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))
        if item.get_closest_marker("shards_on_cpus"):
            item.add_marker(NOT_SHARDED)


def pytest_collection_finish():
    """Collect garbage again, but only what is made from now on."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item, nextitem):
    """Close the process group that a module's tests have left open: torch allows one in a process."""
    torn_down = yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and (nextitem is None or nextitem.path != item.path) and dist.is_initialized():
        dist.destroy_process_group()
    return torn_down


def pytest_terminal_summary(terminalreporter):
    """List what the runs of a campaign have measured."""
    reports = [each for name in ("passed", "failed") for each in terminalreporter.stats.get(name, ())]
    if rows := [dict(each.user_properties)["campaign"] for each in reports if "campaign" in dict(each.user_properties)]:
        terminalreporter.write_line(table_of(rows))
