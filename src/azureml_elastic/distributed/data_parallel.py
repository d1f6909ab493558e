"""``DistributedDataParallel`` for a process that outlives its process group."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel import distributed as torch_parallel

from azureml_elastic.errors import RoundBroken

_KEPT = (
    *("training", "_backward_hooks", "_backward_pre_hooks", "_forward_hooks", "_forward_hooks_with_kwargs"),
    *("_forward_hooks_always_called", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
"""Attributes that ``nn.Module`` initializes and scripts may change."""


@dataclass
class _Elastic:
    """Attributes of the process, which deep copies of the model share."""

    absorb: Callable[[RuntimeError], bool]
    discarded: Callable[[], bool]
    options: dict[str, Any]
    awaits_state: bool
    communication_hook: tuple[Any, Callable[..., Any]] | None = None

    def __deepcopy__(self, _: Any) -> _Elastic:
        return self


class ElasticDataParallel(DistributedDataParallel):
    """``DistributedDataParallel`` whose process group can be replaced under it.

    Args:
        absorb: handler of errors of the forward pass. Where it returns true, the step is discarded, and the pass is
            repeated without the other ranks.
        discarded: predicate that is true while the current step is discarded.
        awaits_state: whether :meth:`settle` follows, so that the weights of rank 0 are not sent to the others now.
    """

    def __init__(
        self,
        module: nn.Module,
        absorb: Callable[[RuntimeError], bool],
        discarded: Callable[[], bool],
        *,
        awaits_state: bool = False,
        **options: Any,
    ) -> None:
        _construct(self, module, options, awaits_state=awaits_state)
        self._elastic = _Elastic(absorb, discarded, options, awaits_state=awaits_state)
        if awaits_state:
            self._send_buffers()

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register the script's communication hook, for the process groups that follow, too."""
        super().register_comm_hook(state, hook)
        self._elastic.communication_hook = state, hook

    def reform(self, *, awaits_state: bool = False) -> None:
        """Continue with the present default process group. A collective, as the constructor is.

        If another rank is lost meanwhile, this fails, and can be called again with the next process group.

        Raises:
            RoundBroken: the script's communication hook refers to a process group of an earlier round.
        """
        hook = self._elastic.communication_hook
        if hook is not None and any(
            isinstance(each, dist.ProcessGroup) for each in (hook[0], getattr(hook[0], "process_group", None))
        ):
            raise RoundBroken("The state of the model's communication hook refers to a process group that has ended.")
        # What the constructor would reset. It is put back also where a rank is lost meanwhile: the module can then be
        # formed again, with its hooks.
        kept = {name: getattr(self, name) for name in _KEPT if hasattr(self, name)}
        module, elastic = self.module, self._elastic
        self.dissolve()  # before the new reducer is made: the old one holds the old group
        elastic.awaits_state = awaits_state
        try:
            options = elastic.options
            _construct(self, module, options, awaits_state=awaits_state)
            if hook is not None:
                DistributedDataParallel.register_comm_hook(self, *hook)
            if awaits_state:
                self._send_buffers()
        finally:
            self.module, self._elastic = module, elastic
            for name, value in kept.items():
                setattr(self, name, value)

    def settle(self, restored: Collection[int]) -> None:
        """Overwrite the weights with rank 0's, but those restored (by ``id``): all ranks have them. A collective."""
        if self._elastic.awaits_state and self._elastic.options.get("init_sync", True):
            for name, parameter in self.module.named_parameters():
                if id(parameter) not in restored and name not in self.parameters_to_ignore:
                    dist.broadcast(parameter.detach(), src=0, group=self.process_group)
        self._elastic.awaits_state = False

    def _send_buffers(self) -> None:
        """Overwrite the buffers with those of rank 0, as ``DistributedDataParallel`` does with the weights."""
        options = self._elastic.options
        if options.get("init_sync", True) and options.get("broadcast_buffers") is not False and self.modules_buffers:
            self._sync_buffers()  # type: ignore[no-untyped-call]

    def dissolve(self) -> None:
        """Release the process group and remove the hooks on the parameters.

        The group goes last. A group joins its threads when its last owner goes, and they may need the GIL for that.
        The reducer, which the logger owns as well, would hold the GIL meanwhile; the group's own object does not.
        """
        for name in ("reducer", "logger", "process_group"):
            self.__dict__.pop(name, None)

    def __del__(self) -> None:
        """Release the process group of a model that a script drops after it has left the group, or after an error."""
        self.dissolve()

    def share_buffers(self) -> None:
        """Overwrite the buffers of all ranks with those of rank 0. A collective."""
        if self.broadcast_buffers and self.modules_buffers:
            self._sync_buffers()  # type: ignore[no-untyped-call]

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Run the module. While gradients are enabled, the buffers of rank 0 are broadcast first."""
        # Other ranks take no part in a discarded step. Without gradients no buffers are exchanged either: one rank may
        # evaluate alone.
        if self._elastic.discarded() or not torch.is_grad_enabled():
            return self.module(*inputs, **named)
        try:
            return super().forward(*inputs, **named)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            if not self._elastic.absorb(error):
                raise
            # The next round has begun, and the step is discarded: no other rank takes part in it.
            return self.module(*inputs, **named)


def _construct(
    model: DistributedDataParallel, module: nn.Module, options: dict[str, Any], *, awaits_state: bool
) -> None:
    """Run torch's constructor; where the weights come later, without its exchange of those that are there."""
    if not awaits_state:
        DistributedDataParallel.__init__(model, module, **options)
    elif "init_sync" in inspect.signature(DistributedDataParallel.__init__).parameters:
        DistributedDataParallel.__init__(model, module, **{**options, "init_sync": False})
    else:  # torch 2.6
        usual = {name: getattr(torch_parallel, name) for name in _EXCHANGES}
        try:
            for name in _EXCHANGES:
                setattr(torch_parallel, name, lambda *_, **__: None)
            DistributedDataParallel.__init__(model, module, **options)
        finally:
            for name, function in usual.items():
                setattr(torch_parallel, name, function)


_EXCHANGES = ("_verify_param_shape_across_processes", "_sync_module_states")
"""What torch's constructor does if its ``init_sync`` is true, which releases before 2.7 do not have."""
