"""Run the study; writes ``benchmarks/results/dynamic-sgd.md`` and its picture.

The exit code is 1 if the page's text contradicts the measurements.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from string import Template

import sklearn
import torch
from picture import Panel, draw
from problem import PROBED
from study import AFTER, BEFORE, POLICIES, Outcome, Setting, difference, run

from azureml_elastic.config import FixedPerWorkerBatch, Ramp
from azureml_elastic.train.optim.learning_rate import ramp_steps

HERE = Path(__file__).parent
ONE, FIXED, UNPREPARED, RAMP, RESCALE, CAPPED, ROOT, NONE = "one worker", *POLICIES
SHORT = "linear, ramp of 96 steps"

Outcomes = Mapping[str, Outcome]


def compare(setting: Setting, names: Sequence[str]) -> dict[str, Outcome]:
    """Run policies by name."""
    policies = {**POLICIES, ONE: POLICIES[FIXED], SHORT: FixedPerWorkerBatch(scaling="linear", momentum=Ramp(steps=96))}
    alone = replace(setting, worlds=tuple((share, 1) for share, _ in setting.worlds))
    found = {}
    for name in names:
        began = time.monotonic()
        each = found[name] = run(alone if name == ONE else setting, policies[name])
        worlds = ", ".join(str(size) for _, size in setting.worlds)
        print(
            f"workers {worlds}, rate {setting.rate:g}, {name}: test loss {each.losses.mean():.4f}, {each.lost} lost, "
            f"{time.monotonic() - began:.0f} s",
            flush=True,
        )
    return found


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows]]
    return "\n".join(lines)


def peak(outcome: Outcome, change: int) -> str:
    peaks = outcome.changes[change].peak
    return f"{peaks.mean():.2f} ({peaks.max():.2f})"


def more(outcomes: Outcomes, name: str) -> str:
    """Return by how much a policy's test loss is above one worker's."""
    if name == ONE:
        return ""
    found = difference(outcomes[name], outcomes[ONE], paired=True)
    return f"{found.mean:+.4f} ± {2 * found.error:.4f}" if found.mean else "0"


def main_table(outcomes: Outcomes) -> str:
    head = ["", "steps", "peak, 1 → 12", "peak, 12 → 1", "test loss", "more than one worker's", "accuracy"]
    rows = [
        [
            name,
            f"{each.steps:,}",
            peak(each, 0),
            peak(each, 1),
            f"{each.losses.mean():.4f}",
            more(outcomes, name),
            f"{each.accuracies.mean():.1%}",
        ]
        for name, each in outcomes.items()
    ]
    return table(head, rows)


def lost_table(outcomes: Outcomes) -> str:
    head = ["", "peak, 1 → 12", "seeds lost", "test loss", "more than one worker's", "accuracy"]
    rows = [
        [
            name,
            peak(each, 0),
            f"{each.lost} of {len(each.losses)}",
            f"{each.losses.mean():.4f}",
            more(outcomes, name),
            f"{each.accuracies.mean():.1%}",
        ]
        for name, each in outcomes.items()
    ]
    return table(head, rows)


def drop_table(outcomes: Outcomes) -> str:
    head = ["", "loss before", "peak, 12 → 1", "seeds lost"]
    rows = [
        [name, f"{each.changes[1].before.mean():.3f}", peak(each, 1), f"{each.lost} of {len(each.losses)}"]
        for name, each in outcomes.items()
    ]
    return table(head, rows)


def changes_table(by_sizes: Mapping[tuple[int, int], tuple[int, Outcomes]], momentum: float) -> str:
    """Return the peaks after rises, by the index of the change in a run."""
    names = [ONE, UNPREPARED, RAMP]
    rows = [
        [
            f"{old} → {new}",
            f"{ramp_steps(Ramp(), new / old, momentum)}",
            *(peak(outcomes[name], place) for name in names),
        ]
        for (old, new), (place, outcomes) in by_sizes.items()
    ]
    return table(["", "steps of the ramp", *(f"peak, {name}" for name in names)], rows)


def machine() -> str:
    return (
        f"{platform.system()} on {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"scikit-learn {sklearn.__version__}, one thread"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=Setting.samples, help="of a run; others have a third")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=HERE.parents[1], help="root of the folders of page and picture")
    arguments = parser.parse_args()
    torch.set_num_threads(1)

    whole = Setting(samples=arguments.samples, seeds=arguments.seeds, seed=arguments.seed)
    third = replace(whole, samples=whole.samples // 3)
    full = replace(third, decays=())
    slow = replace(whole, rate=whole.rate / 5, momentum=0.98)
    hot = replace(third, rate=2 * whole.rate)

    main_ = compare(whole, [ONE, *POLICIES])
    hot_ = compare(hot, [ONE, UNPREPARED, RAMP])
    drop = compare(full, [ONE, UNPREPARED, RAMP, ROOT, NONE])
    by_sizes = {(1, 12): (0, drop)}
    for size in (2, 6):
        rises = compare(replace(full, worlds=((0, 1), (1 / 3, size), (2 / 3, 12))), [UNPREPARED, RAMP])
        by_sizes[size, 12] = (1, {ONE: drop[ONE], **rises})
    gentle = compare(replace(whole, rate=0.02), [ONE, RAMP])
    horizon = compare(slow, [ONE, UNPREPARED, SHORT, RAMP])

    same = torch.equal(main_[FIXED].losses, main_[ONE].losses)
    page = Template((HERE / "page.md").read_text("utf-8")).substitute(
        samples=f"{whole.samples:,}",
        rate=f"{whole.rate:g}",
        momentum=f"{whole.momentum:g}",
        seeds=whole.seeds,
        seed=whole.seed,
        probe=f"{PROBED:,}",
        before=f"{BEFORE:,}",
        after=f"{AFTER:,}",
        same="to the bit" if same else "nearly",
        main=main_table(main_),
        hot_rate=f"{hot.rate:g}",
        hot_samples=f"{hot.samples:,}",
        hot=lost_table(hot_),
        drop=drop_table(drop),
        changes=changes_table(by_sizes, full.momentum),
        long=ramp_steps(Ramp(), 12, slow.momentum),
        slow_rate=f"{slow.rate:g}",
        horizon=lost_table(horizon),
        steps_fixed=f"{main_[FIXED].steps:,}",
        steps_scaled=f"{main_[RAMP].steps:,}",
        peak_unprepared=f"{main_[UNPREPARED].changes[0].peak.mean():.2f}",
        peak_ramp=f"{main_[RAMP].changes[0].peak.mean():.2f}",
        lost_unprepared=hot_[UNPREPARED].lost,
        lost_ramp=hot_[RAMP].lost or "none",
        hot_ramp_more=more(hot_, RAMP),
        ramp_more=more(main_, RAMP),
        gentle_more=more(gentle, RAMP),
        capped_more=more(main_, CAPPED),
        root_more=more(main_, ROOT),
        rescale_more=more(main_, RESCALE),
        none_more=more(main_, NONE),
        minutes=max(1, round(time.process_time() / 60)),
        date=f"{datetime.now().astimezone():%Y-%m-%d}",
        machine=machine(),
    )
    results, assets = arguments.out / "benchmarks" / "results", arguments.out / "docs" / "assets"
    for folder in (results, assets):
        folder.mkdir(parents=True, exist_ok=True)
    (results / "dynamic-sgd.md").write_text(page, "utf-8")
    picture = draw(
        "Linear scaling of the learning rate needs a ramp upwards, and none downwards",
        [
            Panel("1 → 12 workers", {name: main_[name].changes[0] for name in (ONE, UNPREPARED, RAMP, RESCALE, ROOT)}),
            Panel("12 → 1 worker, no decay", {name: drop[name].changes[1] for name in (ONE, RAMP, ROOT, NONE)}),
        ],
    )
    (assets / "dynamic-sgd.svg").write_text(picture, "utf-8")

    def loss(name: str) -> float:
        return float(main_[name].losses.mean())

    shorter = difference(horizon[SHORT], horizon[RAMP], paired=True)
    claims = {
        "the fixed global batch learns what one worker learns, to the bit": same,
        "linear scaling without a ramp lets the loss jump": main_[UNPREPARED].changes[0].peak.mean() > 1.5,
        "with a ramp it does not": main_[RAMP].changes[0].peak.mean() < 1.25,
        "at twice the rate the ramp keeps networks from being lost": hot_[RAMP].lost < hot_[UNPREPARED].lost,
        "the factor may fall at once": drop[RAMP].lost == 0
        and drop[RAMP].changes[1].peak.mean() < drop[ONE].changes[1].peak.mean() + 0.05,
        "the ramp has to grow with the horizon of the momentum": shorter.mean > 0 and shorter.significant,
        "a smaller factor learns as well": max(loss(CAPPED), loss(ROOT)) < loss(RAMP),
        "a ramp is better than to rescale, and that better than nothing": loss(RAMP) < loss(RESCALE) < loss(UNPREPARED),
        "no scaling learns less": loss(NONE) > loss(ONE),
        "linear scaling is the better the smaller the rate is": difference(gentle[RAMP], gentle[ONE], paired=True).mean
        < difference(main_[RAMP], main_[ONE], paired=True).mean,
    }
    for claim, holds in claims.items():
        if not holds:
            print(f"The page says that {claim}, which was not measured.", file=sys.stderr)
    return 0 if all(claims.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
