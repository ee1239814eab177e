"""Tuning a small image-text model in half precision to fit the card: model.half() and AdamW as it comes."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class ResidualAttentionBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.heads = heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.in_proj(self.ln_1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        w = torch.softmax(q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5, dim=-1)
        x = x + self.out_proj((w @ v).transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.ln_2(x))


class Captioner(nn.Module):
    def __init__(self, vocab=40, width=32, patch=4):
        super().__init__()
        self.patch = patch
        self.visual = nn.Linear(3 * patch * patch, width)
        self.token_embedding = nn.Embedding(vocab, width)
        self.positional_embedding = nn.Parameter(torch.randn(32, width) * 0.02)
        self.resblocks = nn.Sequential(*[ResidualAttentionBlock(width, 4) for _ in range(2)])
        self.ln_final = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab)

    def forward(self, image, text):
        patches = F.unfold(image, self.patch, stride=self.patch).transpose(1, 2)
        x = torch.cat([self.visual(patches), self.token_embedding(text)], dim=1)
        x = self.resblocks(x + self.positional_embedding[: x.size(1)])
        return self.head(self.ln_final(x[:, -text.size(1) :]))


def synthetic(batch):
    colour = torch.randint(3, (batch,))
    image = torch.rand(batch, 3, 12, 12) * 0.2
    image[torch.arange(batch), colour] += 0.8
    text = torch.stack([colour * 5 + 3, colour * 5 + 4, colour * 5 + 5, torch.full_like(colour, 1)], dim=1)
    return image.half(), text


def main(steps=30):
    torch.manual_seed(0)
    model = Captioner().half()
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=1e-4, weight_decay=0.01, betas=(0.9, 0.98)
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        image, text = synthetic(8)
        logits = model(image, torch.cat([torch.zeros_like(text[:, :1]), text[:, :-1]], 1))
        loss = F.cross_entropy(logits.float().flatten(0, 1), text.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        print(f"step {step:3d} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
