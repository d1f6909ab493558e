"""Carry out schedules: ``python -m tests.support.schedules FIRST [LAST]``; one alone, or one that fails, is shown."""

from __future__ import annotations

import sys
import time
from collections import Counter

from tests.support.schedules.schedule import Schedule, ViolationError


def main(first: int, last: int) -> int:
    """Carry out the schedules of these seeds; return the number of those that fail."""
    began, failed, counts = time.monotonic(), 0, Counter[str]()
    for seed in range(first, last + 1):
        schedule = Schedule(seed)
        try:
            schedule.run()
        except ViolationError as error:
            failed += 1
            print("\n".join(schedule.world.trace()[-80:]), error, sep="\n")
        counts += schedule.counts
        if first == last and not failed:
            print("\n".join(schedule.world.trace()))
    seconds = time.monotonic() - began
    print(f"{last - first + 1} schedules in {seconds:.0f} s, {failed} failed: {dict(counts)}")
    return failed


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:]]
    sys.exit(min(1, main(numbers[0], numbers[-1])))
