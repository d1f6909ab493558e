"""Draw ``assets/report-light.png`` and ``assets/report-dark.png`` from the folder of a run; needs Chromium.

azureml-elastic local --nodes 1:3 --audit --checkpoint-every-steps 25 --run-dir runs/report-picture \
    --chaos "kill=rank0@step:60,add@step:70,preempt=any@step:260/10s" samples/digits.py --epochs 16 --step-delay 0.2
python docs/draw_report.py runs/report-picture
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from azureml_elastic.ledger.picture import Picture
from azureml_elastic.ledger.reading import read_events
from azureml_elastic.ledger.summary import load_report
from azureml_elastic.report.page import write_page

WIDTH, HEIGHT = 1120, 1475
SCHEMES = {"dark": 0, "light": 1}
ASSETS = Path(__file__).parent / "assets"


def draw(page: Path, target: Path, scheme: int, profile: Path) -> None:
    """Write a picture of the upper part of the page."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}")
    size = (f"--window-size={WIDTH},{HEIGHT}", f"--blink-settings=preferredColorScheme={scheme}")
    subprocess.run([browser, *options, *size, f"--screenshot={target}", page.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    folder = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        write_page(load_report(folder), Picture.of(read_events(folder / "events")), scratch / "report.html")
        for scheme, value in SCHEMES.items():
            draw(scratch / "report.html", ASSETS / f"report-{scheme}.png", value, scratch / "profile")
