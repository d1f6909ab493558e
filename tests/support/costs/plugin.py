"""pytest's hooks: the dearest tests and the sum in the terminal's summary, and an end to those that hang.

``-o test_cpu_limit=1800`` and ``-o test_wait_limit=1800`` change the limits of all tests,
``@pytest.mark.limits(cpu_s=900, wait_s=900)`` those of one.
"""

from __future__ import annotations

import os
import sys
import time

import pytest

from tests.support.costs.meter import open_meter
from tests.support.costs.watch import Limits, Watch

SHOWN = 20
LEAST_S = 0.5
"""CPU seconds below which a test is not among the dearest, however few there are."""


def pytest_addoption(parser):
    # The longest test takes 100 s on a quiet machine, and the dearest 65 CPU seconds.
    parser.addini("test_cpu_limit", "CPU seconds of a test, with all that it starts", default="300")
    parser.addini("test_wait_limit", "seconds of a test in which a core was free for it", default="300")


def pytest_configure(config):
    config.addinivalue_line("markers", "limits(cpu_s=..., wait_s=...): what a test may use before it is ended")
    config.pluginmanager.register(Costs(config), "costs of tests")


class Costs:
    """Measures the tests of this process, and in the process that xdist's workers report to, all of it."""

    def __init__(self, config):
        self._config = config
        self._began, self._before = time.monotonic(), time.process_time()
        # A worker's group is below that of the process which has started it, so the sum there has all workers.
        self._meter = open_meter(f"tests-{os.getpid()}")
        self._first = self._meter.seconds()
        self._watch = Watch(self._meter, _fail, self._give_up)
        self._tests = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        marker = item.get_closest_marker("limits")
        given = marker.kwargs if marker else {}
        limits = Limits(
            float(given.get("cpu_s", self._config.getini("test_cpu_limit"))),
            float(given.get("wait_s", self._config.getini("test_wait_limit"))),
        )
        self._watch.begin(item.nodeid, limits)
        try:
            return (yield)
        finally:
            self._watch.end()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self):
        with self._watch.interruptible():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self):
        with self._watch.interruptible():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self):
        with self._watch.interruptible():
            return (yield)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        if call.when == "teardown":  # a report carries them from xdist's workers
            item.user_properties.append(("cpu_s", round(self._watch.used(), 2)))

    def pytest_enter_pdb(self):
        self._watch.end()

    def pytest_runtest_logreport(self, report):
        if report.when == "teardown":
            self._tests[report.nodeid] = dict(report.user_properties).get("cpu_s", 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        costs = sorted(((cost, test) for test, cost in self._tests.items() if cost >= LEAST_S), reverse=True)[:SHOWN]
        if costs:
            terminalreporter.section(f"the {len(costs)} dearest of {len(self._tests)} tests, in CPU seconds")
        for cost, test in costs:
            terminalreporter.write_line(f"{cost:7.1f} {test}")
        cpu_s = self._before + self._meter.seconds() - self._first
        wall_s = time.monotonic() - self._began
        terminalreporter.write_line(
            f"CPU seconds of all: {cpu_s:.0f} ({self._meter.kind}), in {wall_s:.0f} s on {os.cpu_count()} cores"
        )

    def pytest_unconfigure(self):
        # A worker of xdist waits for the others.
        self._watch.close(waits=hasattr(self._config, "workerinput"))
        self._meter.close()

    def _give_up(self, text):
        capture = self._config.pluginmanager.getplugin("capturemanager")
        capture.suspend(in_=True)
        printed = "".join(capture.read_global_capture())
        sys.stderr.write(f"\n{printed}\n{text}")
        sys.stderr.flush()


def _fail(text):
    pytest.fail(text)
