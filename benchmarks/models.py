"""The models whose training is measured: a GPT, a ResNet-18-like CNN, an LSTM."""

import itertools

import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(self.act(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers, width, heads, context, vocabulary):
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    def __init__(self, before, after, stride):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, 1, 1, bias=False), nn.BatchNorm2d(after)
        same = before == after and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x):
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + self.short(x))


class ResNet(nn.Sequential):
    def __init__(self, width):
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = [
            Residual(before, after, 1 if number == 0 or again else 2)
            for number, (start, after) in enumerate(itertools.pairwise(widths))
            for again, before in enumerate((start, after))
        ]
        super().__init__(
            nn.Conv2d(3, width, 3, 1, 1),
            nn.ReLU(),
            *blocks,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8 * width, 10),
        )


class LSTM(nn.Module):
    def __init__(self, vocabulary, width):
        super().__init__()
        self.token, self.cells = nn.Embedding(vocabulary, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.cells(self.token(tokens))[0])


def _language(model, vocabulary, batch, length, device):
    tokens = torch.randint(vocabulary, (batch, length + 1), device=device)
    return lambda: F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


def make(name, device="cpu"):
    """A model of that name on the device, and a function that runs it on a batch and gives the loss.

    ``gpt`` (6 layers, width 256, batch 8 x 256), ``cnn`` (ResNet-18's layout at half its width, batch 16 x 32 x 32),
    ``lstm`` (2 layers of 256, batch 16 x 64).
    """
    torch.manual_seed(0)
    if name == "gpt":
        model = GPT(6, 256, 4, 256, 512).to(device)
        return model, _language(model, 512, 8, 256, device)
    if name == "lstm":
        model = LSTM(512, 256).to(device)
        return model, _language(model, 512, 16, 64, device)
    model = ResNet(32).to(device)
    images, labels = torch.randn(16, 3, 32, 32, device=device), torch.randint(10, (16,), device=device)
    return model, lambda: F.cross_entropy(model(images).float(), labels)
