"""Trains a diffusion model and its average, which hooks save beside the state, in the shape of diffusers' scripts."""

from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from offline import SAMPLES, arguments, record
from torch.nn import functional
from torch.utils.data import Dataset


class Images(Dataset):
    def __init__(self):
        self.images = torch.rand(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"input": self.images[index]}


args = arguments(epochs=2)
project = ProjectConfiguration(project_dir=str(args.output_dir), logging_dir=str(args.output_dir / "logs"))
accelerator = Accelerator(project_config=project)
torch.manual_seed(0)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8, 8),
    down_block_types=("DownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "UpBlock2D"),
    norm_num_groups=4,
)
ema = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)


def save_model_hook(models, weights, output_dir):
    if accelerator.is_main_process:
        ema.save_pretrained(Path(output_dir) / "unet_ema")
        for each in models:
            each.save_pretrained(Path(output_dir) / "unet")
            weights.pop()


def load_model_hook(models, input_dir):
    loaded = EMAModel.from_pretrained(Path(input_dir) / "unet_ema", UNet2DModel)
    ema.load_state_dict(loaded.state_dict())
    for _ in range(len(models)):
        each = models.pop()
        found = UNet2DModel.from_pretrained(input_dir, subfolder="unet")
        each.register_to_config(**found.config)
        each.load_state_dict(found.state_dict())


accelerator.register_save_state_pre_hook(save_model_hook)
accelerator.register_load_state_pre_hook(load_model_hook)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train_dataloader = torch.utils.data.DataLoader(Images(), batch_size=4, shuffle=True)
lr_scheduler = get_scheduler(
    "cosine", optimizer=optimizer, num_warmup_steps=10, num_training_steps=len(train_dataloader) * args.epochs
)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
ema.to(accelerator.device)
global_step, losses = 0, []
for _epoch in range(args.epochs):
    model.train()
    for batch in train_dataloader:
        clean = batch["input"]
        # Noise by the image, in place of random numbers, which are others for each division of the samples.
        noise = clean.flip(-1) - 0.5
        timesteps = (clean.sum((1, 2, 3)) * 1000).long() % 100
        noisy = noise_scheduler.add_noise(clean, noise, timesteps)
        with accelerator.accumulate(model):
            loss = functional.mse_loss(model(noisy, timesteps).sample, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema.step(model.parameters())
            global_step += 1
            if accelerator.is_main_process and global_step % 10 == 0:
                accelerator.save_state(str(args.output_dir / f"checkpoint-{global_step}"))
        losses.append(loss.detach().item())
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    unet = accelerator.unwrap_model(model)
    ema.store(unet.parameters())
    ema.copy_to(unet.parameters())
    DDPMPipeline(unet=unet, scheduler=noise_scheduler).save_pretrained(args.output_dir / "pipeline")
    averaged = torch.cat([each.flatten() for each in unet.parameters()]).norm()
    ema.restore(unet.parameters())
    record(args, completed_steps=global_step, updates=ema.optimization_step, averaged=float(averaged.detach()))
accelerator.end_training()
