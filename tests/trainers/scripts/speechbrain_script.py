"""Trains by speechbrain's Brain, with its checkpointer and counter of epochs: without a session."""

import sys
import types
from importlib.machinery import ModuleSpec

# No torchaudio is published for this torch, and Brain needs nothing of it but its name.
torchaudio = types.ModuleType("torchaudio")
torchaudio.__version__, torchaudio.__spec__ = "2.11.0", ModuleSpec("torchaudio", None)
sys.modules["torchaudio"] = torchaudio

import speechbrain as sb  # noqa: E402
import torch  # noqa: E402
from offline import Points, arguments, record  # noqa: E402
from torch import nn  # noqa: E402

args = arguments(epochs=6)


class Brain(sb.Brain):
    """Predicts the sum of a point."""

    def compute_forward(self, batch, stage):
        return self.modules.model(batch[0])

    def compute_objectives(self, predictions, batch, stage):
        return nn.functional.mse_loss(predictions, batch[1])

    def on_stage_end(self, stage, stage_loss, epoch=None):
        if stage == sb.Stage.VALID:
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, name=f"epoch-{epoch}")


sb.utils.distributed.ddp_init_group({"distributed_launch": True, "distributed_backend": "gloo"})
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
counter = sb.utils.epoch_loop.EpochCounter(limit=args.epochs)
checkpointer = sb.utils.checkpoints.Checkpointer(
    args.output_dir / "checkpoints", recoverables={"model": model, "counter": counter}
)
brain = Brain(
    {"model": model},
    opt_class=lambda parameters: torch.optim.Adam(parameters, 1e-2),
    hparams={},
    run_opts={"device": "cpu", "distributed_launch": True, "distributed_backend": "gloo", "noprogressbar": True},
    checkpointer=checkpointer,
)
brain.fit(
    counter,
    Points(80),
    Points(40, seed=1),
    train_loader_kwargs={"batch_size": 4, "shuffle": True},
    valid_loader_kwargs={"batch_size": 4},
)
if sb.utils.distributed.if_main_process():
    record(args, epochs=counter.current)
torch.distributed.destroy_process_group()
