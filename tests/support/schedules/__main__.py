"""Carry out schedules: ``python -m tests.support.schedules FIRST [LAST]``; one alone, or one that fails, is shown.

``--quiet`` shows only what does not hold, ``--first`` ends with the first schedule that fails.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.support.schedules.fence import check_fence
from tests.support.schedules.schedule import Schedule


def main(first: int, last: int, *, quiet: bool, only_first: bool) -> int:
    """Carry out the schedules of these seeds; return the number of those that fail."""
    began, failed, counts = time.process_time(), 0, Counter[str]()
    longest: dict[str, float] = {}
    for seed in range(first, last + 1):
        schedule = Schedule(seed)
        try:
            schedule.run()
            check_fence(seed)
        except AssertionError as error:
            failed += 1
            print(*([] if quiet else schedule.world.trace()[-80:]), error, sep="\n", flush=True)
        counts += schedule.counts
        name = schedule.family.name
        longest[name] = max(longest.get(name, 0.0), round(schedule.standstill, 1))
        if first == last and not failed:
            print("\n".join(schedule.world.trace()))
        if failed and only_first:
            break
    seconds = time.process_time() - began
    print(f"{seed - first + 1} schedules in {seconds:.0f} CPU s, {failed} failed: {dict(counts)}")
    print(f"longest standstill in seconds: {longest}")
    return failed


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:] if each.isdigit()]
    options = {*sys.argv[1:]}
    sys.exit(min(1, main(numbers[0], numbers[-1], quiet="--quiet" in options, only_first="--first" in options)))
