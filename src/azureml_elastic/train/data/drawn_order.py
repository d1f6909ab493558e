"""The order of a sampler of the script's own, or the batches of its batch sampler, as the order of an elastic loader.

What a sampler yields may depend on random numbers and on what it has yielded before, also where it receives its epoch.
Each process draws all epochs up to its own, and random numbers begin anew with each: so the same order comes again in a
new process in the middle of an epoch. That of rank 0 is the order of all ranks; where another rank draws another one,
its log says so.

The samples of a loader are then the positions of an epoch: a sampler may draw one of the dataset's twice. The batches
of a batch sampler are trained as they are, since a loss may compare their samples with each other: each counts as one
sample, and a rank's share of a step is a number of whole batches.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from azureml_elastic.errors import UsageError
from azureml_elastic.train.data.loader import seeded
from azureml_elastic.train.data.sampling import FILLER_SAMPLES

_LOG = logging.getLogger(__name__)


class DrawnOrder:
    """The order that a sampler or batch sampler draws for each epoch.

    Args:
        sampler: iterable over indices of the dataset, or over lists of them; it has a length
        whole_batches: whether it yields batches
        agree: collective that returns rank 0's value

    Attributes:
        name: name of the sampler's class
        length: number of samples, or of batches, of an epoch
    """

    def __init__(self, sampler: Any, *, whole_batches: bool, seed: int, agree: Callable[[Any], Any]) -> None:
        self.name = type(sampler).__name__
        self.length = len(sampler)
        self.whole_batches = whole_batches
        self._sampler = sampler
        self._seed = seed
        self._agree = agree
        self._epoch = -1  # of what is drawn
        self._drawn: list[Any] = []
        self._warned = False
        self._differed = False

    def agree(self) -> None:
        """Take rank 0's order of what is drawn, where it was drawn before all ranks could agree. A collective."""
        epoch, drawn = self._epoch, self._drawn
        self._epoch, self._drawn = self._agree((epoch, drawn))
        if epoch == self._epoch:
            self._compare(drawn, self._drawn)

    def largest(self, epoch: int) -> int:
        """Return the number of samples of the largest batch of an epoch; 1 for samples. Likewise a collective."""
        if not self.whole_batches:
            return 1
        if epoch > self._epoch:
            self._draw(epoch)
        return max(map(len, self._drawn))

    def some(self, epoch: int) -> list[int]:
        """Return one or two samples, or those of a batch, of what is drawn; if nothing is, those of an epoch."""
        if self._epoch < 0:
            self._draw(epoch)
        return [*self._drawn[0]] if self.whole_batches else self._drawn[:FILLER_SAMPLES]

    def samples(self, epoch: int, numbers: list[int], *, counts: bool = True) -> list[int]:
        """Return the samples of the dataset that an epoch has at these positions; a collective for another epoch.

        Args:
            numbers: numbers of positions, or of batches
            counts: whether they are trained; of a filler's batches the first one is enough
        """
        if epoch != self._epoch:
            self._draw(epoch)
        found = [self._drawn[number] for number in numbers]
        return (
            [sample for batch in (found if counts else found[:1]) for sample in batch] if self.whole_batches else found
        )

    def _draw(self, epoch: int) -> None:
        if epoch < self._epoch:
            raise UsageError(f"{self.name} has drawn epoch {self._epoch}, and cannot draw epoch {epoch} again.")
        drawn: list[Any] = []
        for each in range(self._epoch + 1, epoch + 1):
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(each)
            with seeded(self._seed, each, "order"):
                drawn = [list(batch) for batch in self._sampler] if self.whole_batches else [*map(int, self._sampler)]
        # Once an epoch, and not its seed alone: what a sampler yields may depend on what only one process has.
        agreed = self._agree(drawn)
        self._compare(drawn, agreed)
        self._epoch, self._drawn = epoch, self._fitted(agreed)

    def _compare(self, mine: list[Any], agreed: list[Any]) -> None:
        if mine != agreed and not self._differed:
            self._differed = True
            _LOG.warning(
                "%s draws another order on this rank than on rank 0, which that of rank 0 replaces. Give it the same "
                "seed on all ranks; if it divides the samples among the ranks by itself, those of the others are never "
                "trained, so that it must not.",
                self.name,
            )

    def _fitted(self, drawn: list[Any]) -> list[Any]:
        """Return as many samples or batches as the sampler has promised: by their number the stack counts its steps."""
        if len(drawn) == self.length:
            return drawn
        if not drawn:
            raise UsageError(f"{self.name} yields nothing, but its length is {self.length}.")
        if not self._warned:
            self._warned = True
            _LOG.warning(
                "%s has a length of %d, but yields %d %s: %s.",
                self.name,
                self.length,
                len(drawn),
                "batches" if self.whole_batches else "samples",
                "the first ones are trained again" if len(drawn) < self.length else "the last ones are left out",
            )
        return (drawn * -(-self.length // len(drawn)))[: self.length]
