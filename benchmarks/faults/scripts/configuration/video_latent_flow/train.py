"""Flow matching on video latents; the pipeline runs in its torch_dtype, the optimizer on FP32 copies."""

import torch
import torch.nn.functional as F
from dit import WanModel

torch.manual_seed(1025)
torch_dtype = torch.bfloat16
FRAMES, CHANNELS = 16, 4
motion = torch.randn(5, FRAMES, CHANNELS)


class FlowMatchScheduler:
    def __init__(self, steps=1000, shift=5.0):
        sigma = torch.linspace(1, 0.003, steps)
        self.sigmas = shift * sigma / (1 + (shift - 1) * sigma)
        self.timesteps = self.sigmas * steps

    def add_noise(self, latents, noise, index):
        sigma = self.sigmas[index][:, None, None]
        return (1 - sigma) * latents + sigma * noise


scheduler = FlowMatchScheduler()
pipe = WanModel().to(torch_dtype)
master = [p.detach().float().clone().requires_grad_() for p in pipe.parameters()]
opt = torch.optim.AdamW(master, lr=2e-3)
for step in range(200):
    latents = torch.einsum("nk,kfc->nfc", torch.randn(32, 5), motion) / 2
    noise = torch.randn_like(latents)
    timestep_id = torch.randint(1000, (32,))
    timestep = scheduler.timesteps[timestep_id]
    noisy = scheduler.add_noise(latents, noise, timestep_id)
    given = timestep.to(torch_dtype)
    prediction = pipe(noisy.to(torch_dtype), given)
    loss = F.mse_loss(prediction.float(), noise - latents)
    pipe.zero_grad()
    loss.backward()
    for m, p in zip(master, pipe.parameters()):
        m.grad = p.grad.float()
    opt.step()
    with torch.no_grad():
        for m, p in zip(master, pipe.parameters()):
            p.copy_(m)
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")
