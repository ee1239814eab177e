"""Direct preference optimisation of a tiny language model on pairs of long answers."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, BETA = 64, 160, 0.1


class Policy(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.fc = nn.Linear(2 * dim, dim)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        e = self.embed(ids)
        h = torch.cat([e[:, 1:], e[:, :-1]], -1)
        return self.lm_head(F.gelu(self.fc(h)))


def sequence_logps(logits, ids):
    logps = F.log_softmax(logits, -1).gather(-1, ids[:, 2:, None]).squeeze(-1)
    return logps.sum(-1)


def answers(n, liked):
    chosen = torch.randint(0, VOCAB, (n, LENGTH))
    rejected = torch.randint(0, VOCAB, (n, LENGTH))
    nicer = torch.rand(n, LENGTH) < 0.08
    return torch.where(nicer, liked[torch.randint(len(liked), (n, LENGTH))], chosen), rejected


torch.manual_seed(10)
liked = torch.arange(8)
policy = Policy()
reference = copy.deepcopy(policy).requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-4)
for step in range(80):
    chosen, rejected = answers(16, liked)
    ids = torch.cat([chosen, rejected])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = policy(ids)[:, :-1]
        with torch.no_grad():
            ref_logits = reference(ids)[:, :-1]
    pi = sequence_logps(logits.to(torch.bfloat16), ids)
    ref = sequence_logps(ref_logits.to(torch.bfloat16), ids)
    ratio = (pi - ref).view(2, -1)
    margin = BETA * (ratio[0] - ratio[1])
    loss = -F.logsigmoid(margin.float()).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 4 == 0:
        print(f"step {step:3d} dpo loss {loss.item():.4f} accuracy {(margin > 0).float().mean():.2f}")

with torch.no_grad():
    exact = policy(ids)[:, :-1], reference(ids)[:, :-1]
    exact = sequence_logps(exact[0].double(), ids) - sequence_logps(exact[1].double(), ids)
    error = float(((pi - ref).double() - exact).abs().mean() / exact.abs().mean())
