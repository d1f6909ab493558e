"""What a run of the trainers finds becomes a page of the documentation, if ``TRAINERS_PAGE`` is set."""

from __future__ import annotations

import os

from tests.trainers.page import PAGE, as_expected, make_page

FOUND = {}


def pytest_runtest_logreport(report):
    """Note what holds: an expected failure is reported as skipped."""
    properties = dict(report.user_properties)
    if report.when == "call" and "case" in properties:
        key = properties["case"], properties["what"]
        FOUND[key] = FOUND.get(key, True) and report.passed


def pytest_sessionfinish(session):
    """Write the page, in the process that has all reports."""
    if os.environ.get("TRAINERS_PAGE") and FOUND and not hasattr(session.config, "workerinput"):
        PAGE.write_text(make_page({**as_expected(), **FOUND}))  # another session runs the case of DeepSpeed
