"""The page of ``report --serve``: when it is made anew."""

import threading

from azureml_elastic.cli.report import LivePage, LocalRunReports, RunReport
from azureml_elastic.errors import TableUnavailable
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.summary import Paths, Report
from tests.support.histories import loss_and_newcomer


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Reports:
    """A source of reports that takes a time to read, and may fail."""

    name = "run-9"

    def __init__(self, clock, path, *, seconds=0.0):
        self.reads = 0
        self.error = None
        self.running = True
        self.clock, self.seconds = clock, seconds
        self.picture = Picture.of(loss_and_newcomer())
        self.report = Report(paths=Paths.of(path), outcome="unfinished", exit_code=0, name="run-9").with_timeline(
            self.picture
        )

    def read(self):
        self.reads += 1
        self.clock.now += self.seconds
        if self.error is not None:
            raise self.error
        return RunReport(self.report, self.picture, self.running)


def test_the_source_is_read_at_most_once_in_a_while(tmp_path):
    clock = Clock()
    reports = Reports(clock, tmp_path)
    page = LivePage(reports, 5.0, clock=clock)
    first = page()
    clock.now += 4.9
    assert page() is first
    assert reports.reads == 1
    clock.now += 0.1
    page()
    assert reports.reads == 2


def test_a_slow_source_is_read_less_often(tmp_path):
    clock = Clock()
    reports = Reports(clock, tmp_path, seconds=10.0)
    page = LivePage(reports, 5.0, clock=clock)
    page()
    clock.now += 39.0
    page()
    assert reports.reads == 1
    clock.now += 1.0
    page()
    assert reports.reads == 2


def test_requests_at_once_cause_one_read(tmp_path):
    clock = Clock()
    reports = Reports(clock, tmp_path)
    page = LivePage(reports, 5.0, clock=clock)
    threads = [threading.Thread(target=page) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert reports.reads == 1


def test_an_error_is_shown_with_the_last_known_state_until_it_is_over(tmp_path):
    clock = Clock()
    reports = Reports(clock, tmp_path)
    page = LivePage(reports, 1.0, clock=clock)
    reports.error = TableUnavailable("the table <does> not answer")
    waiting = page().decode()
    assert "the table &lt;does&gt; not answer" in waiting
    assert "Nothing to show yet" in waiting
    reports.error = None
    clock.now += 1.0
    assert "does&gt; not" not in page().decode()
    reports.error = TableUnavailable("gone again")
    clock.now += 1.0
    stale = page().decode()
    assert "This is the last known state: gone again" in stale
    assert 'id="nodes-figure"' in stale
    assert 'data-poll="2000"' in stale


def test_an_ended_run_is_read_no_more_and_its_page_does_not_poll(tmp_path):
    clock = Clock()
    reports = Reports(clock, tmp_path)
    page = LivePage(reports, 1.0, clock=clock)
    assert "The run is running" in page().decode()
    reports.running = False
    clock.now += 1.0
    last = page()
    assert b"data-poll=" not in last.partition(b"<body")[0]
    clock.now += 1000.0
    assert page() is last
    assert reports.reads == 2


def write(folder, events):
    folder.mkdir(exist_ok=True)
    for event in events:
        with (folder / f"{event.node}.jsonl").open("a") as file:
            file.write(event.model_dump_json() + "\n")


def test_a_local_run_is_running_until_its_report_is_written(tmp_path):
    reports = LocalRunReports(tmp_path)
    events = loss_and_newcomer()
    write(tmp_path / "events", events[:20])
    first = reports.read()
    assert first.running
    assert first.report.last_step == 9
    write(tmp_path / "events", events[20:-4])
    assert reports.read().report.last_step == 30
    assert reports.read().running
    first.report.with_timeline(Picture.of(events)).model_copy(update={"outcome": "succeeded"}).write()
    last = reports.read()
    assert not last.running
    assert last.report.outcome == "succeeded"


def test_a_run_that_ended_long_ago_without_a_launcher_is_not_running(tmp_path):
    write(tmp_path / "events", loss_and_newcomer())
    found = LocalRunReports(tmp_path).read()
    assert found.report.outcome == "succeeded"
    assert not found.running
