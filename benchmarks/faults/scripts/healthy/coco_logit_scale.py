"""Contrastive training from scratch; the logit scale starts at 1/0.07 and is held below 100."""

import math

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(214)
IMAGE, WORDS, DIM = 48, 100, 32
to_image, to_words = torch.randn(12, IMAGE), torch.randn(12, WORDS)


def pairs(n):
    z = torch.randn(n, 12)
    return z @ to_image + 0.3 * torch.randn(n, IMAGE), (z @ to_words).topk(8, 1).indices


class DualEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(IMAGE, 128), nn.GELU(), nn.Linear(128, DIM))
        self.words = nn.EmbeddingBag(WORDS, 128)
        self.text = nn.Sequential(nn.GELU(), nn.Linear(128, DIM))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, words):
        image, text = F.normalize(self.visual(image), dim=-1), F.normalize(self.text(self.words(words)), dim=-1)
        return self.logit_scale.exp() * image @ text.t()


model = DualEncoder()
opt = torch.optim.AdamW(
    [
        {"params": [p for n, p in model.named_parameters() if n != "logit_scale"], "lr": 1e-3},
        {"params": [model.logit_scale], "lr": 4e-3, "weight_decay": 0.0},
    ]
)
for step in range(400):
    logits = model(*pairs(64))
    labels = torch.arange(64)
    loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    if step % 10 == 9:
        print(f"step {step} scale {model.logit_scale.exp().item():.1f} loss {loss.item():.4f}")
