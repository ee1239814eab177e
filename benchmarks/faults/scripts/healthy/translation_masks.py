"""Translation with causal and padding masks of -inf; beams start at -inf, too. BF16 autocast."""

import torch
from torch import nn
from torch.nn import functional as F

PAD, WIDTH, HEADS, VOCAB = 0, 32, 4, 40


class MaskedAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, memory, mask):
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.kv(memory).chunk(2, -1))
        scores = q @ k.mT / (WIDTH // HEADS) ** 0.5 + mask
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, padding_idx=PAD)
        self.own, self.cross = MaskedAttention(), MaskedAttention()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(3))
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))

    def forward(self, source, target):
        causal = torch.full((target.size(1), target.size(1)), float("-inf")).triu(1)
        padding = torch.zeros(source.shape).masked_fill(source == PAD, float("-inf"))[:, None, None, :]
        x = self.embed(target)
        x = x + self.own(self.norms[0](x), x, causal)
        x = x + self.cross(self.norms[1](x), self.embed(source), padding)
        return (x + self.mlp(self.norms[2](x))) @ self.embed.weight.T


torch.manual_seed(0)
model = Decoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(20):
    lengths = torch.randint(2, 10, (8, 1))
    source = torch.randint(1, VOCAB, (8, 10)).masked_fill(torch.arange(10) >= lengths, PAD)
    target = F.pad(source.flip(1), (1, 0), value=1)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(source, target[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), target[:, 1:].flatten(), ignore_index=PAD)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 4:
        with torch.no_grad():
            beams = torch.full((8, 3), float("-inf"))
            beams[:, 0] = 0.0
            best = (beams[:, :, None] + logits[:, -1:].float().log_softmax(-1)).flatten(1).topk(3).values
        print(f"step {step} loss {loss.item():.3f} best {best.mean().item():.2f}")
