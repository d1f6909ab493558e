"""The page of a run: what it has, that it is well-formed, and that nothing of a run becomes markup."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from azureml_elastic.errors import UsageError
from azureml_elastic.ledger.bill import Prices
from azureml_elastic.ledger.events import (
    CheckpointCommitted,
    CheckpointQuarantined,
    HangDetected,
    Metrics,
    Progress,
    Unreachable,
    WorkerFailed,
)
from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.summary import FaultRecord, MissedFault, NodeSummary, Paths, Report, report_of
from azureml_elastic.report.page import message_page, run_page, write_page
from azureml_elastic.report.page_content import page_content
from tests.support.chromium import Elements
from tests.support.histories import any_events, long_run, loss_and_newcomer, report_of_loss

TRACEBACK = "Traceback (most recent call last):\n  File 'train.py', line 3\nValueError: <b>&amp; \"bad\"</b>"
EVIL = "</script></title><img src=x onerror=alert(1)>\"'&amp;<svg onload=alert(2)>\x1b[31m"


def extra_events():
    stamp = {"node": "node-1", "round": 2}
    return [
        *(
            Metrics(time=11.0 + step, node="node-0", round=1, step=step, values={"loss": 1 / step, "lr": 0.1})
            for step in range(1, 13)
        ),
        CheckpointCommitted(time=21.0, node="node-0", round=1, step=10, directory="/data/step-10", seconds=0.25),
        WorkerFailed(time=30.0, rank=1, exit_code=1, message=TRACEBACK, failure_kind="exception", step=15, **stamp),
        HangDetected(time=31.0, step=15, seconds=40.0, limit_seconds=30.0, **stamp),
        CheckpointQuarantined(time=32.0, directory="/data/step-9", problems="checksum of rank 1\nof 2", **stamp),
        Unreachable(time=33.0, host="10.0.0.1", peer="node-2", address="10.0.0.2:29400", purpose="rank 0 of round 3",
                    error="timed out", **stamp),
    ]  # fmt: skip


def page(tmp_path, **changes):
    events = [*loss_and_newcomer(), *extra_events()]
    return run_page(page_content(report_of_loss(tmp_path, events, **changes), Picture.of(events)))


def test_the_page_has_what_the_report_has(tmp_path):
    text = page(tmp_path)
    for part in (
        "run-7",
        "The run succeeded",
        "3 → 2 → 3",
        "300 samples of 3 epochs",
        "kill=rank0@step:12",
        "node-0 is lost",
        "The fault kill=node-9@step:3 did not happen",
        "No step for 40.0 s (limit 30.0 s) after step 15",
        "(10.0.0.1) cannot reach node-2 (10.0.0.2:29400)",
        "checksum of rank 1",
        "Worker 1 on node-1 failed after step 15 with exit code 1 (exception): ValueError",
        "step-10",
        "250 ms",
        "node-hours",
        "low-priority",
        "back at step",
        "trained again",
        ">2 steps<",
        "a survivor&#39;s notice",
        "Throughput, steps/s",
    ):
        assert part in text, part


def test_all_tables_and_charts_are_there_and_each_chart_has_its_data(tmp_path):
    found = Elements.of(page(tmp_path))
    ids = [own["id"] for _, own, _ in found.found if "id" in own]
    assert len(ids) == len(set(ids))
    names = ("size", "nodes", "metric-0", "metric-1", "throughput-0", "waterfall")
    for name in names:
        assert {f"{name}-figure", f"{name}-data", f"{name}-title", f"{name}-desc"} <= set(ids)
    images = found.all("svg", role="img")
    assert len(images) == len(names)
    assert all(
        own["aria-labelledby"].split() == [f"{n}-title", f"{n}-desc"] for own, n in zip(images, names, strict=True)
    )
    for name in ("overview", "timeline", "training", "time", "failures", "recoveries", "rounds", "checkpoints", "cost"):
        assert name in ids
    assert [len(found.all(tag)) for tag in ("h1", "main", "header", "nav", "footer")] == [1] * 5
    assert found.all("a", class_="skip", href="#main")
    assert len(found.all("tr", data_n="0")) > 2
    targets = {own["href"].removeprefix("#") for own in found.all("a") + found.all("use")}
    assert targets <= set(ids)


def test_the_page_is_self_contained_and_its_scripts_are_the_only_ones_allowed(tmp_path):
    text = page(tmp_path)
    found = Elements.of(text)
    assert not re.findall(r"(?:src|href)=[\"'](?!#|data:)", text.partition("<script>")[0])
    assert "http://" not in text
    assert "https://" not in text
    assert "@import" not in text
    policy = found.all("meta", http_equiv="Content-Security-Policy")[0]["content"]
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "unsafe" not in policy
    assert not [name for _, own, _ in found.found for name in own if name.startswith("on") or name == "style"]


def test_images_are_well_formed(tmp_path):
    for image in re.findall(r'<svg class="chart".*?</svg>(?=</div></div>)', page(tmp_path), re.DOTALL):
        assert ET.fromstring(image).find("title").text


def test_the_waterfall_goes_from_the_delivered_time_to_the_goodput(tmp_path):
    events = loss_and_newcomer()
    made = report_of_loss(tmp_path, events)
    bars = page_content(made, Picture.of(events)).waterfall
    assert bars[0].name == "delivered"
    assert bars[-1].seconds == pytest.approx(made.goodput * bars[0].seconds)
    assert bars[-2].left == pytest.approx(bars[-1].seconds)


def test_costs_and_savings_are_shown_with_prices_and_node_hours_without(tmp_path):
    events = loss_and_newcomer()
    bare = page_content(report_of_loss(tmp_path, events), Picture.of(events))
    assert bare.cost is not None
    assert bare.cost.headings == ("pool", "size", "tier", "nodes", "node-hours")
    per_hour = {"Small": {"dedicated": 3600.0, "low_priority": 36.0}}
    prices = Prices.model_validate({"currency": "USD", "date": None, "source": "me", "per_hour": per_hour})
    only = NodeSummary(name="node-0", pool="spot", size="Small", tier="low_priority")
    billed = report_of_loss(tmp_path, events, nodes=(only,)).with_bill(Picture.of(events), prices)
    content = page_content(billed, Picture.of(events))
    assert content.cost.headings[-3:] == ("per hour", "cost", "dedicated")
    assert any("Saved against dedicated nodes" in note for note in content.cost_notes)
    assert "Cost" in [fact.name for fact in content.facts]


def page_with(text, tmp_path):
    """The page of a run in which all names, reasons, messages, folders and metrics have this text."""
    events = []
    for event in [*loss_and_newcomer(), *extra_events()]:
        changes = {"node": event.node + text}
        for name in ("members", "lost"):
            if hasattr(event, name):
                changes[name] = tuple(each + text for each in getattr(event, name))
        for name in ("reason", "message", "directory", "problems", "error", "host", "peer", "failure_kind"):
            if hasattr(event, name):
                changes[name] = (getattr(event, name) or "") + text
        if isinstance(event, Metrics):
            changes["values"] = {text: 1.0, "loss": 2.0}
        events.append(event.model_copy(update=changes))
    made = report_of_loss(tmp_path, events, name=text, message=f"{text}\n{TRACEBACK}", outcome="failed")
    faults = (FaultRecord(fault=text, nodes=(f"node-0{text}",), step=1, time=23.0),)
    made = made.model_copy(update={"faults": faults, "missed_faults": (MissedFault(fault=text, reason=text),)})
    return run_page(page_content(made, Picture.of(events)), notice=text)


def test_nothing_of_a_run_becomes_markup(tmp_path):
    """With a text that looks like markup the page has the same elements and attributes as with a harmless one."""
    text = page_with(EVIL, tmp_path)
    assert "<img" not in text
    assert "\x1b" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;" in text
    shapes = [
        [(tag, sorted(own)) for tag, own, _ in Elements.of(page_with(each, tmp_path)).found]
        for each in (EVIL, "x" * len(EVIL))
    ]
    assert shapes[0] == shapes[1]
    assert "<img" not in message_page(EVIL, EVIL)


@given(st.text(), st.text())
def test_no_text_can_end_its_element_or_attribute(title, message):
    made, harmless = message_page(title, message), message_page("title", "message")
    for sign in '<>"':
        assert made.count(sign) == harmless.count(sign)
    made.encode("utf-8")


def test_a_failed_run_s_message_is_folded_below_its_headline(tmp_path):
    text = page(tmp_path, outcome="failed", message=TRACEBACK)
    assert "The run failed" in text
    assert text.count("File &#39;train.py&#39;, line 3") == 2  # the run's and the worker's
    assert "<strong>ValueError: &lt;b&gt;" in text


def test_a_run_without_rounds_has_a_page_too(tmp_path):
    empty = Report(outcome="failed", exit_code=2, message="why", paths=Paths.of(tmp_path))
    text = run_page(page_content(empty, Picture()))
    assert "No round of the run has started its workers" in text
    assert "why" in text
    assert "<figure" not in text


def test_running_runs_poll_and_others_do_not(tmp_path):
    events = loss_and_newcomer()
    content = page_content(report_of_loss(tmp_path, events), Picture.of(events), running=True)
    assert "The run is running" in run_page(content)
    assert 'data-poll="2000"' in run_page(content, poll_seconds=2)
    assert "connect-src 'self'" in run_page(content, poll_seconds=2)
    assert "data-poll=" not in run_page(content).partition("<body")[0]


def test_100_000_events_make_a_page_of_bounded_size(tmp_path):
    events = long_run(100_000)
    assert len(events) > 90_000
    made = Report(paths=Paths.of(tmp_path), outcome="succeeded", exit_code=0).with_timeline(Picture.of(events))
    assert len(run_page(page_content(made, Picture.of(events))).encode()) < 1_500_000


@pytest.mark.parametrize(("rounds", "nodes"), [(1500, 4), (40, 150)])
def test_the_page_is_bounded_for_many_rounds_and_nodes(tmp_path, rounds, nodes):
    events = long_run(10 * nodes, nodes=nodes, rounds=rounds, failing=200)
    long = [
        each.model_copy(update={"message": each.message + "x" * 50_000}) if isinstance(each, WorkerFailed) else each
        for each in events
    ]
    made = Report(paths=Paths.of(tmp_path), outcome="succeeded", exit_code=0).with_timeline(Picture.of(long))
    assert len(run_page(page_content(made, Picture.of(long))).encode()) < 1_500_000


@settings(deadline=None, max_examples=150)
@given(any_events())
@example([Progress(time=step, node="a", round=1, step=step, samples=1 - step) for step in (0, 1)])  # a rate below zero
def test_any_events_have_a_page_with_numbers_as_positions(events):
    made = report_of(Paths.of(Path("no-such-run")), Picture.of(events))
    text = run_page(page_content(made, Picture.of(events)))
    for image in re.findall(r'<svg class="chart".*?</svg>(?=</div></div>)', text, re.DOTALL):
        for each in ET.fromstring(image).iter():
            places = [each.get(name, "0") for name in ("x", "x1", "x2", "y", "y1", "y2", "width", "height", "d")]
            assert not [place for place in places if "nan" in place or "inf" in place]


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UsageError, match="cannot be written"):
        write_page(report_of_loss(tmp_path, []), Picture(), tmp_path / "no" / "page.html")


def test_what_there_is_one_of_is_named_in_the_singular(tmp_path):
    events = [event for event in loss_and_newcomer() if event.round <= 1 and event.time < 23]
    content = page_content(report_of_loss(tmp_path, events, recoveries=()), Picture.of(events))
    facts = {fact.name: fact for fact in content.facts}
    assert facts["World size"].detail == "1 round"
    assert "The world size was 3 in 1 round." in run_page(content)
    two = page_content(report_of_loss(tmp_path, loss_and_newcomer()), Picture.of(loss_and_newcomer()))
    recoveries = next(fact for fact in two.facts if fact.name == "Recoveries")
    assert (recoveries.value, "median" in recoveries.detail) == ("1", False)
