"""The proof that a run saw each sample of each epoch exactly once, whatever happened to its nodes.

Workers write down the samples of every step before they take part in it, and that it is completed afterwards. A step is
*completed* in a round when one of its ranks says so: the gradients of all ranks were reduced then, also those of one
that died in that moment. A completed step *counts* when no later round started from an earlier one: the model that
comes out of the run then contains it. With ``restored[r]`` for the number of steps that
round ``r`` started after, step ``s`` of round ``r`` counts if and only if::

    s <= min(restored[q] for q > r)          # always, for the last round

All other steps were rolled back, and what they had seen was trained again. Over the steps that count, each pair
(epoch, sample) has to occur once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from azureml_elastic.ledger.events import Event, Restored

__all__ = ["SampleAudit", "SampleLine", "audit_samples", "restored_steps", "surviving_steps"]


@dataclass(frozen=True)
class SampleLine:
    """What one worker saw in one step.

    Args:
        round: in which the step was taken.
        step: counts from 1 over the whole run.
        epoch: counts from 0; negative in a line that names no samples.
        ids: indices into the data set.
        done: whether the line says that the step is completed.
        of: samples that the epoch trains; fewer than the data set has where the last batch is dropped. ``None`` where
            that is not known.
        loader: whose samples they are.
    """

    round: int
    step: int
    epoch: int
    ids: tuple[int, ...]
    done: bool = True
    of: int | None = None
    loader: str = "train"


@dataclass(frozen=True)
class SampleAudit:
    """The outcome of the proof.

    Args:
        dataset_size: samples of the longest epoch.
        epochs: epochs that were begun.
        steps: steps that count.
        seen: samples seen in them.
        missing: pairs (epoch, sample) that never occurred, in all epochs but the last.
        repeated: occurrences beyond the first of a pair.
        unfinished: samples of the last epoch that never occurred: the script stopped early, or they were lost.
        rolled_back_steps: steps that a later round undid.
        rolled_back_samples: samples in those, which were trained again.
        torn_lines: lines cut short by the loss of their writer.
    """

    dataset_size: int = 0
    epochs: int = 0
    steps: int = 0
    seen: int = 0
    missing: int = 0
    repeated: int = 0
    unfinished: int = 0
    rolled_back_steps: int = 0
    rolled_back_samples: int = 0
    torn_lines: int = 0

    @property
    def exactly_once(self) -> bool:
        """Whether no sample was missed or repeated; the last epoch may have been stopped early."""
        return self.missing == 0 and self.repeated == 0

    @property
    def complete(self) -> bool:
        """Whether the last epoch was seen to its end as well."""
        return self.seen > 0 and self.exactly_once and self.unfinished == 0


def restored_steps(events: Iterable[Event]) -> dict[int, int]:
    """Return for each round that began to train the number of steps after which it did."""
    return {event.round: event.step for event in events if isinstance(event, Restored)}


def surviving_steps(restored: Mapping[int, int], rounds: Iterable[int]) -> dict[int, float]:
    """Return for each round the last step that no later round undid (infinity for the last one)."""
    return {
        number: min((step for later, step in restored.items() if later > number), default=math.inf)
        for number in set(rounds)
    }


def audit_samples(
    lines: Iterable[SampleLine],
    restored: Mapping[int, int],
    *,
    dataset_size: int | None = None,
    torn_lines: int = 0,
) -> SampleAudit:
    """Check that each sample of each epoch was seen exactly once.

    Args:
        lines: of all workers of all rounds.
        restored: see :func:`restored_steps`.
        dataset_size: samples of one epoch; ``None`` takes what the lines say, else the largest index, plus one.
        torn_lines: passed through.

    Returns:
        The counts; all zero when there are no lines.
    """
    everything = list(lines)
    completed = {(line.round, line.step) for line in everything if line.done}
    lines = [line for line in everything if line.epoch >= 0 and (line.round, line.step) in completed]
    surviving = surviving_steps(restored, (line.round for line in lines))
    counted = [line for line in lines if line.step <= surviving[line.round]]
    undone = [line for line in lines if line.step > surviving[line.round]]
    sizes = _sizes(everything, lines, dataset_size)
    occurrences: dict[tuple[str, int], Counter[int]] = {}
    for line in counted:
        occurrences.setdefault((line.loader, line.epoch), Counter()).update(line.ids)
    last: dict[str, int] = {}
    for loader, epoch in occurrences:
        last[loader] = max(epoch, last.get(loader, -1))
    absent = {
        (loader, epoch): sizes[loader, epoch] - len(occurrences.get((loader, epoch), ()))
        for loader, end in last.items()
        for epoch in range(end + 1)
    }
    return SampleAudit(
        dataset_size=max(sizes.longest.values(), default=0),
        epochs=max(last.values(), default=-1) + 1,
        steps=len({line.step for line in counted}),
        seen=sum(seen.total() for seen in occurrences.values()),
        missing=sum(count for (loader, epoch), count in absent.items() if epoch != last[loader]),
        repeated=sum(seen.total() - len(seen) for seen in occurrences.values()),
        unfinished=sum(absent[loader, epoch] for loader, epoch in last.items()),
        rolled_back_steps=len({(line.round, line.step) for line in undone}),
        rolled_back_samples=sum(len(line.ids) for line in undone),
        torn_lines=torn_lines,
    )


class _Sizes(dict[tuple[str, int], int]):
    """By loader and epoch; an epoch of which nothing is known is as long as the loader's longest."""

    def __init__(self, known: Mapping[tuple[str, int], int], longest: Mapping[str, int]) -> None:
        super().__init__(known)
        self.longest = longest

    def __missing__(self, key: tuple[str, int]) -> int:
        return self.longest[key[0]]


def _sizes(everything: Iterable[SampleLine], lines: list[SampleLine], dataset_size: int | None) -> _Sizes:
    """Return the samples of each epoch: as given, as the last line of the epoch says, or by the largest index."""
    if dataset_size is not None:
        return _Sizes({}, {line.loader: dataset_size for line in lines})
    said: dict[tuple[str, int], tuple[int, int, int]] = {}
    for line in everything:
        if line.of is not None:
            key, latest = (line.loader, line.epoch), (line.round, line.step, line.of)
            said[key] = max(latest, said.get(key, latest))
    known = {key: size for key, (_, _, size) in said.items()}
    longest: dict[str, int] = {}
    for line in lines:
        if not any(loader == line.loader for loader, _ in known):
            longest[line.loader] = max(longest.get(line.loader, 0), max(line.ids, default=-1) + 1)
    for (loader, _), size in known.items():
        longest[loader] = max(longest.get(loader, 0), size)
    return _Sizes(known, longest)
