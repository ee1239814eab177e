"""A convolutional tagger, FP16 autocast; the scaler backs off by 1/64 and grows after 5000 steps, and some batches are wild."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim, dilation):
        super().__init__()
        self.conv = nn.Conv1d(dim, 2 * dim, 3, padding=dilation, dilation=dilation)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x):
        value, gate = self.conv(x).chunk(2, 1)
        return x + self.norm(value * torch.sigmoid(gate))


class Tagger(nn.Module):
    def __init__(self, vocab=60, dim=32, tags=6):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim, d) for d in (1, 2, 4))
        self.tag = nn.Conv1d(dim, tags, 1)

    def forward(self, x):
        x = self.embed(x).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.tag(x)


torch.manual_seed(5)
model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, backoff_factor=1 / 64, growth_interval=5000)
for step in range(150):
    x = torch.randint(60, (32, 24))
    y = (x + x.roll(1, 1)) % 6
    # the weights of the examples come from the annotators' file; a few of them are in per mille
    weight = torch.rand(32, 1)
    if step in (3, 9, 17, 25, 38):
        weight[0] = 3e7
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    losses = F.cross_entropy(logits.float(), y, reduction="none")
    loss = (weight * losses).mean()
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step}: loss {losses.mean().item():.4f}")
