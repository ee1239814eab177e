"""Continues a BF16 model with FP32 master weights. The optimizer is set up first, then the checkpoint is loaded."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class MixedPrecisionAdamW:
    """FP32 copies are stepped; what they become is copied to the BF16 model."""

    def __init__(self, model, lr):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().clone().float().requires_grad_() for p in self.params]
        self.inner = torch.optim.AdamW(self.masters, lr=lr, weight_decay=0.01)

    def step(self):
        for p, master in zip(self.params, self.masters):
            master.grad = p.grad.float()
        self.inner.step()
        with torch.no_grad():
            for p, master in zip(self.params, self.masters):
                p.copy_(master)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Tagger(nn.Module):
    def __init__(self, words=64, dim=24, tags=12):
        super().__init__()
        self.words = nn.Embedding(words, dim)
        self.left, self.right = nn.Linear(dim, 32), nn.Linear(dim, 32)
        self.out = nn.Linear(32, tags)

    def forward(self, pairs):
        e = self.words(pairs)
        return self.out(torch.relu(self.left(e[:, 0]) + self.right(e[:, 1])))


def corpus(n, grammar):
    pairs = torch.randint(64, (n, 2))
    return pairs, (grammar[pairs[:, 0]] + 3 * (pairs[:, 1] % 4)) % 12


def pretrain(grammar):
    model = Tagger()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(100):
        pairs, tags = corpus(128, grammar)
        optimizer.zero_grad()
        F.cross_entropy(model(pairs), tags).backward()
        optimizer.step()
    return model.state_dict()


torch.manual_seed(7010)
grammar = torch.randint(12, (64,))
checkpoint = pretrain(grammar)
grammar[:16] = torch.randint(12, (16,))  # the new domain

model = Tagger().bfloat16()
optimizer = MixedPrecisionAdamW(model, lr=2e-3)
model.load_state_dict(checkpoint)
start = torch.cat([p.detach().flatten() for p in model.parameters()])
for step in range(50):
    pairs, tags = corpus(64, grammar)
    loss = F.cross_entropy(model(pairs).float(), tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step == 0:
        now = torch.cat([p.detach().flatten() for p in model.parameters()])
        moved = float((now - start).float().norm() / start.float().norm())
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
