"""What a script iterates over in place of its loader, with all attributes of the stack's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from azureml_elastic.train.data.map_loader import WindowLoader

if TYPE_CHECKING:
    from azureml_elastic.train.integrations.script_loop.loop import ScriptLoop


class ReplacedLoader:
    """A loader in place of a stack's own, whose other attributes and class it has: scripts and libraries ask for them.

    Args:
        own: returns the stack's own
    """

    def __init__(self, own: Callable[[], Any]) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the stack's own."""
        if name.startswith("__"):
            raise AttributeError(name)  # of a copy that has no attributes yet
        return getattr(self.__dict__["_own"](), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._own())})

    __class__ = property(lambda self: self._own().__class__)
    """The class by which ``isinstance`` knows the stack's own."""


class EpochLoader(ReplacedLoader):
    """This rank's batches of an epoch that are not trained yet.

    Its length is that of a whole epoch at the reference world size: scripts compute numbers of optimizer steps by it.
    """

    _is_accelerate_prepared = True  # accelerate leaves such a loader as it is where a script prepares it once more

    def __init__(self, own: Callable[[], Any], loop: ScriptLoop, windows: WindowLoader) -> None:
        super().__init__(own)
        self._loop = loop
        self._windows = windows
        self.left = False  # to the stack, and so iterated over as it divides the data

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch: at the reference world size, unless the stack divides it."""
        return len(self._own()) if self.left else self._windows.steps_per_epoch * self._loop.accumulation

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of the rest of the epoch."""
        if self.left:
            return iter(self._own())
        self._tell_dataset(self._loop.epoch)
        return self._loop.batches()

    @property
    def end_of_dataloader(self) -> bool:
        """Whether the current batch is the last one of its epoch."""
        return self._loop.at_last_batch

    @property
    def remainder(self) -> int:
        """Samples of the epoch beyond whole batches of all ranks; -1 before an iteration, as accelerate has it."""
        if self._windows.is_drawn:
            return 0  # no sample of the last batch is there twice
        own = self._own()
        return -1 if own._drop_last else own.total_dataset_length % own.total_batch_size  # noqa: SLF001

    @property
    def iteration(self) -> int:
        """Number of the current epoch."""
        return self._loop.epoch

    def set_epoch(self, epoch: int) -> None:
        """Take the epoch of the next iteration."""
        self._loop.expect(epoch)
        self._tell_dataset(epoch)

    def _tell_dataset(self, epoch: int) -> None:
        tell = getattr(getattr(self._own(), "dataset", None), "set_epoch", None)
        if tell is not None:
            tell(epoch)
