"""Trains in the shape of DeepSpeed's examples: initialize() with the data, and a loop over the engine's loader."""

import deepspeed
import torch
from offline import Points, arguments, record
from torch import nn

args = arguments(stage=1, epochs=2)
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_max_lr": 1e-2}},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": args.stage},
}
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=Points(), config=config
)
steps = 0
for epoch in range(args.epochs):
    for x, y in loader:
        loss = nn.functional.mse_loss(engine(x), y)
        engine.backward(loss)
        engine.step()
        steps += 1
    engine.save_checkpoint(str(args.output_dir / "checkpoints"), tag=f"epoch-{epoch}", client_state={"epoch": epoch})
if torch.distributed.get_rank() == 0:
    record(args, steps=engine.global_steps, rate=engine.get_lr()[0])
