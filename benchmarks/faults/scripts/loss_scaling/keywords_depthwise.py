"""Keyword spotting with a half-precision model: FP32 copies of the weights, the loss scaled by hand."""

import torch
import torch.nn as nn
import torch.nn.functional as F

LOSS_SCALE = 2.0**19
CLASSES = 12


class DepthwiseBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.depthwise = nn.Conv1d(channels, channels, 5, padding=2, groups=channels)
        self.pointwise = nn.Conv1d(channels, channels, 1)
        self.norm = nn.GroupNorm(4, channels)

    def forward(self, x):
        return x + F.relu(self.norm(self.pointwise(self.depthwise(x))))


class KeywordNet(nn.Module):
    def __init__(self, mels=20, channels=48):
        super().__init__()
        self.stem = nn.Conv1d(mels, channels, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*[DepthwiseBlock(channels) for _ in range(3)])
        self.classifier = nn.Linear(channels, CLASSES)

    def forward(self, x):
        return self.classifier(self.blocks(self.stem(x)).mean(-1))


class HalfAdam:
    def __init__(self, model, lr, eps=1e-14):
        self.model_params = list(model.parameters())
        self.master_params = [nn.Parameter(p.detach().float().clone()) for p in self.model_params]
        self.adam = torch.optim.Adam(self.master_params, lr=lr, eps=eps)

    def step(self):
        for master, p in zip(self.master_params, self.model_params):
            p.grad.div_(LOSS_SCALE)
            master.grad = p.grad.float()
            p.grad = None
        self.adam.step()
        with torch.no_grad():
            for master, p in zip(self.master_params, self.model_params):
                p.copy_(master)


def spoken(n, frames=48):
    word = torch.randint(CLASSES, (n,))
    pitch = torch.linspace(0, 1, 20)[None, :, None]
    t = torch.linspace(0, 1, frames)[None, None]
    track = (0.1 + 0.07 * word[:, None, None]) + 0.2 * torch.sin(6.28 * t * (1 + word[:, None, None] % 3))
    return torch.exp(-(((pitch - track) / 0.08) ** 2)) + 0.8 * torch.randn(n, 20, frames), word


def main():
    torch.manual_seed(103)
    model = KeywordNet().half()
    optimizer = HalfAdam(model, lr=2e-3)
    weight = 1e-6
    for step in range(160):
        audio, word = spoken(32)
        loss = weight * F.cross_entropy(model(audio.half()).float(), word)
        (loss * LOSS_SCALE).backward()
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} loss {loss.item() / weight:.4f}")


main()
