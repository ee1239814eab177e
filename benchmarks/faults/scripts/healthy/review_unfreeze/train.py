"""ULMFiT in small: a language model, then a classifier whose layers are unfrozen one by one, with discriminative rates."""

import torch
import torch.nn.functional as F

from model import LanguageModel

torch.manual_seed(1)
V, LENGTH = 40, 12
successor = torch.randperm(V)
polarity = torch.randint(3, (V,))


def corpus(n):
    words = [torch.randint(V, (n,))]
    for _ in range(LENGTH - 1):
        words.append(torch.where(torch.rand(n) < 0.8, successor[words[-1]], torch.randint(V, (n,))))
    tokens = torch.stack(words, 1)
    votes = F.one_hot(polarity[tokens], 3).float().sum(1) + 0.1 * torch.arange(3)
    return tokens, votes.argmax(1)


model = LanguageModel()
optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
for step in range(150):
    tokens, _ = corpus(24)
    lm = F.cross_entropy(model(tokens[:, :-1], "lm").flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    lm.backward()
    optimizer.step()
    if step % 30 == 29:
        print(f"pretraining {step + 1}: perplexity {lm.exp().item():.2f}")

# the classifier: one more layer every 60 steps, each at a rate 2.6 times lower than the one above
body = model.body
body.requires_grad_(False)
stages = [model.classifier, body.high, body.low, body.embed]
groups = [{"params": stage.parameters(), "lr": 4e-3 / 2.6**i} for i, stage in enumerate(stages)]
optimizer = torch.optim.Adam(groups)
for step in range(320):
    if step % 60 == 0 and step // 60 < len(stages):
        stages[step // 60].requires_grad_(True)
    tokens, label = corpus(32)
    loss = F.cross_entropy(model(tokens, "class"), label)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 8 == 0:
        print(f"step {step} loss {loss.item():.4f}")
