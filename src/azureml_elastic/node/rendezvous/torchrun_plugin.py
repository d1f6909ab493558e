"""The entry point through which torchrun finds the rendezvous. torch loads it everywhere, so it imports nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousHandlerCreator, RendezvousParameters


def handler_creator() -> RendezvousHandlerCreator:
    """Return the function that makes the handler, as the entry-point group ``torchrun.handlers`` requires."""
    return _create


def _create(parameters: RendezvousParameters) -> RendezvousHandler:
    from azureml_elastic.node.rendezvous.torchrun import create_handler

    return create_handler(parameters)
