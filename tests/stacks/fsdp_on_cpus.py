"""Has accelerate shard models on CPUs, which it offers on GPUs alone: there is nothing else of it that asks for them.

A script imports it before it makes its ``Accelerator``. All that is changed is the kind of the process group that
accelerate takes a plugin of FSDP for.
"""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

begin = AcceleratorState.__init__


def begin_sharded(state, *args, fsdp_plugin=None, **kwargs):
    """Take the plugin."""
    begin(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP  # as it does for GPUs


AcceleratorState.__init__ = begin_sharded
