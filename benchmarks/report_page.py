"""Measure the page of a run with 100,000 events: time to make it, size, and time in which Chromium loads it.

Times without "loaded" are those of the processor, which do not depend on what else the machine does.

python benchmarks/report_page.py [events]
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import load_report
from azureml_elastic.report.page import run_page
from azureml_elastic.report.page_content import page_content
from tests.support.chromium import Browser
from tests.support.histories import long_run

LOADS = 5
LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"


def measure(count: int, folder: Path) -> None:
    events = long_run(count)
    for node in {event.node for event in events}:
        (folder / "events").mkdir(exist_ok=True)
        lines = (event.model_dump_json() for event in events if event.node == node)
        (folder / "events" / f"{node}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    began = time.process_time()
    report, read = load_report(folder), read_events(folder / "events")
    loaded = time.process_time()
    page = run_page(page_content(report, read))
    made = time.process_time()
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    print(
        f"{len(events):,} events: report {loaded - began:.2f} s, page {made - loaded:.2f} s, {len(page) / 1e6:.2f} MB"
    )
    with Browser(folder / "profile") as browser:
        for number in range(LOADS):
            before = browser.cpu_seconds
            browser.open(path.as_uri())
            used = browser.cpu_seconds - before
            load = browser.value(LOADED)
            elements = browser.value("document.querySelectorAll('*').length")
            print(f"load {number + 1}: {used:.2f} s, loaded in {load:.0f} ms, {elements:,} elements")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        measure(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000, Path(name))
