"""BF16 as it should be: FP32 weights under autocast, a learning rate of 1e-4 and less, and a slow average in FP32."""

import copy

import torch
import torch.nn as nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn


class MixerLayer(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.token_mix = nn.Sequential(nn.Linear(tokens, 32), nn.GELU(), nn.Linear(32, tokens))
        self.channel_mix = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, dim=48, tokens=16, layers=3, classes=6):
        super().__init__()
        self.stem = nn.Conv2d(1, dim, 4, 4)
        self.layers = nn.Sequential(*[MixerLayer(tokens, dim) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.layers(self.stem(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


def glyphs(n, shapes):
    label = torch.randint(6, (n,))
    x = shapes[label] * (0.5 + torch.rand(n, 1, 1, 1))
    return x + 0.5 * torch.randn(n, 1, 16, 16), label


class Module:
    """The few hooks of a Trainer."""

    def __init__(self, lr=4e-4, steps=200):
        self.net = Mixer()
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.999))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=lr, weight_decay=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, steps)

    def training_step(self, batch):
        x, y = batch
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.net(x)
        return nn.functional.cross_entropy(logits.float(), y, label_smoothing=0.05)

    def optimizer_step(self, loss):
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        self.ema.update_parameters(self.net)


def main():
    torch.manual_seed(629)
    shapes = nn.functional.interpolate(torch.randn(6, 1, 4, 4), size=16)
    start = copy.deepcopy(shapes)
    module = Module()
    for i in range(200):
        loss = module.training_step(glyphs(24, start))
        module.optimizer_step(loss)
        if i % 5 == 0:
            print(f"global_step={i} train_loss: {loss.item():.4f}")


if __name__ == "__main__":
    main()
