"""The page of ``report --serve``: when it is made anew."""

import threading

import pytest

from azureml_elastic.cli.report import LivePage, LocalRunReports, RunReport
from azureml_elastic.errors import TableUnavailable
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.summary import Paths, Report
from tests.support.histories import loss_and_newcomer, write_events


class Reports:
    """A source of reports that takes a time to read, and may fail; with a clock and a page of its own."""

    name = "run-9"

    def __init__(self, path, interval):
        self.reads, self.now, self.seconds = 0, 0.0, 0.0
        self.error = None
        self.running = True
        self.page = LivePage(self, interval, clock=lambda: self.now)
        self.picture = Picture.of(loss_and_newcomer())
        self.report = Report(paths=Paths.of(path), outcome="unfinished", exit_code=0, name="run-9").with_timeline(
            self.picture
        )

    def read(self):
        self.reads += 1
        self.now += self.seconds
        if self.error is not None:
            raise self.error
        return RunReport(self.report, self.picture, self.running)


@pytest.mark.parametrize(("seconds", "later"), [(0.0, 5.0), (10.0, 40.0)], ids=["quick", "slow"])
def test_a_source_is_read_at_most_once_in_a_while_and_a_slow_one_less_often(tmp_path, seconds, later):
    reports = Reports(tmp_path, 5.0)
    reports.seconds = seconds
    first = reports.page()
    reports.now += later - 0.1
    assert reports.page() is first
    assert reports.reads == 1
    reports.now += 0.2
    reports.page()
    assert reports.reads == 2


def test_requests_at_once_cause_one_read(tmp_path):
    reports = Reports(tmp_path, 5.0)
    threads = [threading.Thread(target=reports.page) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports.reads == 1


def test_an_error_is_shown_with_the_last_known_state_until_it_is_over(tmp_path):
    reports = Reports(tmp_path, 1.0)
    page = reports.page
    reports.error = TableUnavailable("the table <does> not answer")
    waiting = page().decode()
    assert "the table &lt;does&gt; not answer" in waiting
    assert "Nothing to show yet" in waiting
    reports.error = None
    reports.now += 1.0
    assert "does&gt; not" not in page().decode()
    reports.error = TableUnavailable("gone again")
    reports.now += 1.0
    stale = page().decode()
    assert "This is the last known state: gone again" in stale
    assert 'id="nodes-figure"' in stale
    assert 'data-poll="2000"' in stale


def test_an_ended_run_is_read_no_more_and_its_page_does_not_poll(tmp_path):
    reports = Reports(tmp_path, 1.0)
    page = reports.page
    assert "The run is running" in page().decode()
    reports.running = False
    reports.now += 1.0
    last = page()
    assert b"data-poll=" not in last.partition(b"<body")[0]
    reports.now += 1000.0
    assert page() is last
    assert reports.reads == 2


def test_a_local_run_is_running_until_its_report_is_written(tmp_path):
    reports = LocalRunReports(tmp_path)
    events = loss_and_newcomer()
    write_events(tmp_path / "events", events[:20])
    first = reports.read()
    assert first.running
    assert first.report.last_step == 9
    write_events(tmp_path / "events", events[20:-4])
    assert reports.read().report.last_step == 30
    assert reports.read().running
    first.report.with_timeline(Picture.of(events)).model_copy(update={"outcome": "succeeded"}).write()
    last = reports.read()
    assert not last.running
    assert last.report.outcome == "succeeded"


def test_a_run_that_ended_long_ago_without_a_launcher_is_not_running(tmp_path):
    write_events(tmp_path / "events", loss_and_newcomer())
    found = LocalRunReports(tmp_path).read()
    assert found.report.outcome == "succeeded"
    assert not found.running
