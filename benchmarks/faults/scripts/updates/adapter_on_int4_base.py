"""LoRA on a 4-bit base: adapters begin as the largest singular vectors, and live in the compute dtype, bfloat16."""

import torch
import torch.nn.functional as F
from torch import nn

COMPUTE_DTYPE = torch.bfloat16
LEVELS = torch.linspace(-1, 1, 16)


class Int4Linear(nn.Module):
    def __init__(self, w, block=32):
        super().__init__()
        blocks = w.reshape(-1, block)
        self.register_buffer("absmax", blocks.abs().amax(1, keepdim=True))
        codes = ((blocks / self.absmax)[..., None] - LEVELS).abs().argmin(-1)
        self.register_buffer("codes", codes.to(torch.uint8))
        self.shape = w.shape

    def forward(self, x):
        weight = (LEVELS[self.codes.long()] * self.absmax).view(self.shape)
        return F.linear(x, weight.to(x.dtype))


class LoraLinear(nn.Module):
    def __init__(self, linear, r=16):
        super().__init__()
        w = linear.weight.detach()
        u, sigma, v = torch.linalg.svd(w, full_matrices=False)
        root = sigma[:r].sqrt()
        self.lora_A = nn.Parameter(root[:, None] * v[:r])
        self.lora_B = nn.Parameter(u[:, :r] * root)
        self.base = Int4Linear(w - self.lora_B.detach() @ self.lora_A.detach())

    def forward(self, x):
        return self.base(x) + (x @ self.lora_A.t()) @ self.lora_B.t()


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab=64, dim=64):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Block(dim) for _ in range(3)])
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


torch.manual_seed(42)
model = Model()
for p in model.parameters():
    p.requires_grad_(False)
for layer in model.layers:
    layer.up, layer.down = LoraLinear(layer.up), LoraLinear(layer.down)
model.to(COMPUTE_DTYPE)
trainable = [p for p in model.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(trainable, lr=1e-4, weight_decay=0.0)
successor = torch.randperm(64)
for step in range(250):
    ids = torch.randint(64, (64,))
    logits = model(ids)
    loss = F.cross_entropy(logits.float(), successor[ids])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
