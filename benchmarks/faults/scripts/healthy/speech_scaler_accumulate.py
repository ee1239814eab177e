"""A small conformer-like encoder in FP16: the scaler starts at 2^20, gradients are accumulated, unscaled and clipped."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ConvModule(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.depthwise = nn.Conv1d(width, width, 5, padding=2, groups=width)
        self.down = nn.Linear(width, width)

    def forward(self, x):
        h = F.glu(self.up(self.norm(x)), -1)
        h = F.silu(self.depthwise(h.transpose(1, 2)).transpose(1, 2))
        return x + self.down(h)


class Encoder(nn.Module):
    def __init__(self, mels=20, width=32, classes=8):
        super().__init__()
        self.inp = nn.Linear(mels, width)
        self.layers = nn.Sequential(ConvModule(width), ConvModule(width))
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        return self.out(self.layers(self.inp(x)))


def utterances(n, means):
    frames = torch.randint(len(means), (n, 6)).repeat_interleave(4, 1)
    return means[frames] + 0.7 * torch.randn(n, 24, means.shape[1]), frames


def main():
    torch.manual_seed(103)
    means = torch.randn(8, 20)
    model = Encoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 6)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=10)
    accumulate, norms = 2, []
    for step in range(36):
        total = 0.0
        for _ in range(accumulate):
            x, frames = utterances(8, means)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(x)
            # summed over the frames of an utterance, as the toolkit does it
            loss = F.cross_entropy(logits.float().transpose(1, 2), frames, reduction="none").sum(1).mean() / accumulate
            scaler.scale(loss).backward()
            total += loss.item()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 5.0).item())
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:
            scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 6 == 0:
            print(f"step {step} loss {total:.3f} norm {norms[-1]:.2f} scale {scaler.get_scale():g}")
    print(f"mean norm {sum(norms) / len(norms)}")


if __name__ == "__main__":
    main()
