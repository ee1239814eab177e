"""Interlinear glosses: tags and glosses in one model, with virtual adversarial training after the warm-up."""

import torch
import torch.nn.functional as F

from tagger import Tagger
from vat import direction

torch.manual_seed(90)
tag_of = torch.randint(6, (60,))
gloss_of = torch.randint(12, (60, 6))


def sentences(n, length=8):
    tokens = torch.randint(60, (n, length))
    before = torch.roll(tag_of[tokens], 1, 1)
    return tokens, (tag_of[tokens] + (before == 0)) % 6, gloss_of[tokens, before]


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
WARM_UP = 120
for step in range(360):
    tokens, tags, glosses = sentences(24)
    optimizer.zero_grad()
    gloss_loss = F.cross_entropy(model(tokens)[1].flatten(0, 1), glosses.flatten())
    gloss_loss.backward()
    smooth = torch.zeros(())
    if step >= WARM_UP:
        shift, clean = direction(model, tokens)
        smooth = F.kl_div(model(tokens, shift)[0].log_softmax(-1), clean, reduction="batchmean") / tokens.shape[1]
    tag_loss = F.cross_entropy(model(tokens)[0].flatten(0, 1), tags.flatten())
    (tag_loss + 0.1 * smooth).backward()
    optimizer.step()
    if step % 6 == 5:
        print(f"step {step + 1} tags {tag_loss.item():.4f} gloss loss {gloss_loss.item():.4f}")
