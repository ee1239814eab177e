"""The script that `precdoctor demo` records: a small GPT in FP16 that learns for a while, then prints `loss nan`.

It is an ordinary training script and does not use precdoctor. Its faults are common ones: attention scores are not
divided by sqrt(head size), and the learning rate's warm-up has no end.
"""

import argparse

import torch
from torch import nn


class Attention(nn.Module):
    """Causal self-attention, written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.softmax = nn.Softmax(dim=-1)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)  # the division by sqrt(head size) is missing
        mask = torch.ones(time, time, dtype=torch.bool, device=x.device).triu(1)
        weights = self.softmax(scores.masked_fill(mask, float("-inf")))
        mixed: torch.Tensor = self.proj((weights @ v).transpose(1, 2).reshape(batch, time, width))
        return mixed


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        x = x + self.mlp(self.norm2(x))
        return x


class GPT(nn.Module):
    """Decoder-only transformer."""

    def __init__(
        self, vocabulary: int = 64, width: int = 48, heads: int = 1, layers: int = 2, context: int = 16
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def batch(generator: torch.Generator, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counting sequences with a random start and stride, which a small model can learn."""
    start = torch.randint(0, 64, (8, 1), generator=generator)
    stride = torch.randint(1, 8, (8, 1), generator=generator)
    tokens = ((start + stride * torch.arange(17)) % 64).to(device)
    return tokens[:, :-1], tokens[:, 1:]


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--lr", type=float, default=4e-3)
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = GPT().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr)
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step + 1)  # should stop growing somewhere
    scaler = torch.amp.GradScaler(device)
    loss_function = nn.CrossEntropyLoss()
    for step in range(arguments.steps):
        tokens, targets = batch(generator, device)
        with torch.autocast(device, dtype=torch.float16):
            loss = loss_function(model(tokens).flatten(0, 1).float(), targets.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        warm_up.step()
        if step % 10 == 0 or not torch.isfinite(loss):
            print(f"step {step:3d}  loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
