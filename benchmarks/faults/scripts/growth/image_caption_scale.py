"""Contrastive finetuning of an image and a text tower from a checkpoint whose logit scale is at its usual end."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(46)
PAIRS, IMAGE, WORDS, DIM = 128, 48, 120, 32
to_image = torch.randn(16, IMAGE) / 4
to_words = torch.randn(16, WORDS)


def pairs(n):
    z = torch.randn(n, 16)
    image = z @ to_image + 0.5 * torch.randn(n, IMAGE)
    words = (z @ to_words + 2.0 * torch.randn(n, WORDS)).topk(8, 1).indices
    return image, words


class CLIP(nn.Module):
    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(IMAGE, 96), nn.GELU(), nn.Linear(96, DIM))
        self.token_embedding = nn.Embedding(WORDS, 96)
        self.text_projection = nn.Linear(96, DIM)
        self.logit_scale = nn.Parameter(torch.tensor(4.6052))

    def forward(self, image, words):
        image = F.normalize(self.visual(image), dim=-1)
        text = F.normalize(self.text_projection(self.token_embedding(words).mean(1)), dim=-1)
        logit_scale = self.logit_scale.exp()
        return logit_scale * image @ text.t()


def contrastive(logits):
    y = torch.arange(len(logits))
    return (F.cross_entropy(logits, y) + F.cross_entropy(logits.t(), y)) / 2


def released():
    """Stands for the published checkpoint, which ends with its logit scale at 100."""
    model = CLIP()
    model.logit_scale.requires_grad_(False)
    pretraining = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=3e-3)
    for _ in range(200):
        pretraining.zero_grad()
        contrastive(model(*pairs(64))).backward()
        pretraining.step()
    model.logit_scale.requires_grad_(True)
    return model


model = released()
towers = [p for n, p in model.named_parameters() if n != "logit_scale"]
opt = torch.optim.AdamW(
    [{"params": towers, "lr": 2e-3, "weight_decay": 0.1}, {"params": [model.logit_scale], "lr": 2e-2}], weight_decay=0.0
)
image, words = pairs(PAIRS)
held_out = pairs(128)
for epoch in range(120):
    for pick in torch.randperm(PAIRS).split(64):
        loss = contrastive(model(image[pick], words[pick]))
        opt.zero_grad()
        loss.backward()
        opt.step()
    if epoch % 5 == 4:
        with torch.no_grad():
            print(f"epoch {epoch} held-out loss {contrastive(model(*held_out)).item():.4f}")
