"""Audit of the samples that a run has trained: each sample of each epoch exactly once.

Workers record the samples of every step before the step, and its completion afterwards. A step is *completed* in a
round if one rank has recorded so, because the gradients of all ranks were reduced by then. A completed step *counts* if
no later round started from an earlier step, so that the final model contains it. With ``restored[r]`` for the number of
steps after which round ``r`` started, step ``s`` of round ``r`` counts if and only if::

    s <= min(restored[q] for q > r)          # always, for the last round

All other steps were rolled back and their samples trained again. Over the steps that count, each pair (epoch, sample)
must occur once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from azureml_elastic.ledger.events import Progress
from azureml_elastic.ledger.picture import Picture


@dataclass(frozen=True)
class SampleLine:
    """Samples of one worker in one step.

    Args:
        step: number of the step in the run, from 1.
        epoch: number of the epoch, from 0; negative in a line without samples.
        ids: indices into the data set.
        done: whether the line records the completion of the step.
        of: number of samples that the epoch trains, without a dropped last batch; ``None`` if unknown.
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
    """Result of the audit.

    Args:
        dataset_size: number of samples of the longest epoch.
        epochs: number of started epochs.
        missing: number of pairs (epoch, sample) that never occurred, except in the last epoch.
        repeated: number of occurrences beyond the first of a pair.
        unfinished: number of samples of the last epoch that never occurred.
        rolled_back_steps: number of steps that a later round rolled back.
        rolled_back_samples: number of samples in these steps.
        torn_lines: number of lines cut short by the loss of their writer.
        dropped_lines: number of lines that could not be written, as on a full disk; their samples count as missing.
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
    dropped_lines: int = 0

    @property
    def refuted(self) -> bool:
        """Whether a sample was missed or repeated for sure, and not only in the record."""
        return self.repeated > 0 or (self.missing > 0 and not self.dropped_lines)

    @property
    def exactly_once(self) -> bool:
        """Whether no sample was missed or repeated; the last epoch may be incomplete."""
        return self.missing == 0 and self.repeated == 0

    @property
    def complete(self) -> bool:
        """Whether the last epoch is complete as well."""
        return self.seen > 0 and self.exactly_once and self.unfinished == 0


def surviving_steps(restored: Mapping[int, int], rounds: Iterable[int]) -> dict[int, float]:
    """Return for each round the last step that no later round rolled back (infinity for the last round)."""
    return {
        number: min((step for later, step in restored.items() if later > number), default=math.inf)
        for number in set(rounds)
    }


def steps_undone(picture: Picture) -> dict[int, int]:
    """Return for each round that began at an earlier step than had been reached how many steps it undid."""
    # In the order of the rounds: each begins where the one before has got to, unless it was restored from further back.
    reached, undone = 0, {}
    for number, round_ in sorted(picture.rounds.items()):
        begin = reached if round_.restored is None else round_.restored
        if begin < reached:
            undone[number] = reached - begin
        reached = max(begin, max(round_.steps, default=begin))
    return undone


def trained_samples(picture: Picture) -> int | None:
    """Return the number of samples in the steps that count, by the nodes' progress; ``None`` if they were not counted.

    Where a round's steps were rolled back up to a step that was not recorded, its samples are those in proportion.
    """
    counted: dict[int, dict[int, int]] = {}
    for number, round_ in picture.rounds.items():
        for event in round_.all(Progress):
            if event.samples is not None:
                own = counted.setdefault(number, {round_.restored or 0: 0})
                own[event.step] = max(event.samples, own.get(event.step, 0))
    if not counted:
        return None
    surviving = surviving_steps(picture.restored, counted)
    return round(math.fsum(_samples_at(surviving[number], own) for number, own in counted.items()))


def _samples_at(step: float, counted: Mapping[int, int]) -> float:
    """Return the samples up to a step, of which those up to some steps are known, the first one being 0."""
    before = max((known for known in counted if known <= step), default=None)
    if before is None:
        return 0.0
    after = min((known for known in counted if known > step), default=None)
    if after is None:
        return counted[before]
    share = (step - before) / (after - before)
    return counted[before] + share * (counted[after] - counted[before])


def audit_samples(
    lines: Iterable[SampleLine],
    restored: Mapping[int, int],
    *,
    dataset_size: int | None = None,
    torn_lines: int = 0,
    dropped_lines: int = 0,
) -> SampleAudit:
    """Check that each sample of each epoch was seen exactly once.

    Args:
        restored: completed steps before each round, see :attr:`~azureml_elastic.ledger.picture.Picture.restored`.
        dataset_size: number of samples per epoch; ``None`` for the lines' ``of``, else the largest index plus one.
    """
    everything = list(lines)
    # By any rank: it has completed the step only with the gradients of all others.
    completed = {(line.round, line.step) for line in everything if line.done}
    lines = [line for line in everything if line.epoch >= 0 and (line.round, line.step) in completed]
    surviving = surviving_steps(restored, (line.round for line in lines))
    counted = [line for line in lines if line.step <= surviving[line.round]]
    undone = [line for line in lines if line.step > surviving[line.round]]
    known, longest = _sizes(everything, lines, dataset_size)
    occurrences: dict[tuple[str, int], Counter[int]] = {}
    for line in counted:
        occurrences.setdefault((line.loader, line.epoch), Counter()).update(line.ids)
    last = dict(sorted(occurrences))  # the last epoch of each loader
    absent = {
        (loader, epoch): known.get((loader, epoch), longest[loader]) - len(occurrences.get((loader, epoch), ()))
        for loader, end in last.items()
        for epoch in range(end + 1)
    }
    return SampleAudit(
        dataset_size=max(longest.values(), default=0),
        epochs=max(last.values(), default=-1) + 1,
        steps=len({line.step for line in counted}),
        seen=sum(seen.total() for seen in occurrences.values()),
        missing=sum(count for (loader, epoch), count in absent.items() if epoch != last[loader]),
        repeated=sum(seen.total() - len(seen) for seen in occurrences.values()),
        unfinished=sum(absent[loader, epoch] for loader, epoch in last.items()),
        rolled_back_steps=len({(line.round, line.step) for line in undone}),
        rolled_back_samples=sum(len(line.ids) for line in undone),
        torn_lines=torn_lines,
        dropped_lines=dropped_lines,
    )


def _sizes(
    everything: Iterable[SampleLine], lines: list[SampleLine], dataset_size: int | None
) -> tuple[dict[tuple[str, int], int], dict[str, int]]:
    """Return the recorded number of samples by loader and epoch, and that of each loader's longest epoch.

    The latter is the given one, the largest recorded one, or the largest index plus one.
    """
    if dataset_size is not None:
        return {}, {line.loader: dataset_size for line in lines}
    recorded: dict[tuple[str, int], tuple[int, int, int]] = {}
    for line in everything:
        if line.of is not None:
            # Of several the newest counts: another world size may drop a last batch of another size.
            key, latest = (line.loader, line.epoch), (line.round, line.step, line.of)
            recorded[key] = max(latest, recorded.get(key, latest))
    known = {key: size for key, (_, _, size) in recorded.items()}
    recorded_loaders = {loader for loader, _ in known}
    sizes = [(loader, size) for (loader, _), size in known.items()]
    sizes += [(line.loader, max(line.ids, default=-1) + 1) for line in lines if line.loader not in recorded_loaders]
    longest: dict[str, int] = {}
    for loader, size in sizes:
        longest[loader] = max(longest.get(loader, 0), size)
    return known, longest
