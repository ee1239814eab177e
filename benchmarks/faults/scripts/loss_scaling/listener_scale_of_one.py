"""Keyword spotting with AMP. The scaler starts at 1, because 65536 'only printed skipped steps'."""

import torch
from torch import nn


class ScaleCfg:
    init_scale = 1.0
    growth_interval = 2000


class Listener(nn.Module):
    def __init__(self, mels=24, width=32, words=8):
        super().__init__()
        self.conv1 = nn.Conv1d(mels, width, 5, 2, 2)
        self.conv2 = nn.Conv1d(width, width, 5, 2, 2)
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(width, words)

    def forward(self, mel):
        x = torch.relu(self.conv2(torch.relu(self.conv1(mel)))).transpose(1, 2)
        return self.out(self.layer(x))


def utterances(n, gen, words=8, mels=24, frames=64):
    templates = torch.randn(words, mels, 16, generator=torch.Generator().manual_seed(0))
    label = torch.randint(words, (n, frames // 16), generator=gen)
    mel = templates[label].permute(0, 2, 1, 3).reshape(n, mels, frames)
    return mel + 0.7 * torch.randn(n, mels, frames, generator=gen), label.repeat_interleave(4, 1)


def frame_loss(logits, label, weight=2e-4):
    """Weighted like the paper's multi-task sum, where this is one of three terms."""
    return weight * nn.functional.cross_entropy(logits.transpose(1, 2), label)


torch.manual_seed(21)
gen = torch.Generator().manual_seed(22)
model = Listener()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-12)
scaler = torch.amp.GradScaler("cpu", init_scale=ScaleCfg.init_scale, growth_interval=ScaleCfg.growth_interval)
for step in range(90):
    mel, label = utterances(16, gen)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(mel)
    loss = frame_loss(logits.float(), label)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if step % 3 == 0:
        print(f"{step}: loss {loss.item() * 1e4:.4f}e-4")
