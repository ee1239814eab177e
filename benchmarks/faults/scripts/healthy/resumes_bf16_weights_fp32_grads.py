"""Rank resumes: BF16 weights, FP32 masters in the optimizer, gradients accumulated over 32 micro-batches in FP32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(601)
MICRO, ACCUMULATE = 4, 32
dtype = torch.bfloat16


class Ranker(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.resume, self.job = nn.Linear(40, dim), nn.Linear(40, dim)
        self.norm, self.score = nn.LayerNorm(2 * dim), nn.Linear(2 * dim, 1)

    def forward(self, resume, job):
        h = torch.cat([self.resume(resume), self.job(job)], -1)
        return self.score(F.relu(self.norm(h))).squeeze(-1)


model = Ranker()
main_params = [p.detach().clone() for p in model.parameters()]
model.to(dtype)
main_grads = [torch.zeros_like(p) for p in main_params]
optimizer = torch.optim.AdamW([p.requires_grad_() for p in main_params], lr=1e-2, weight_decay=0.01)
for step in range(40):
    resume, job = torch.randn(2, MICRO * ACCUMULATE, 40)
    fit = (resume[:, :8] + job[:, :8]).sum(1) > 0
    total = 0.0
    for r, j, f in zip(resume.split(MICRO), job.split(MICRO), fit.split(MICRO)):
        loss = F.binary_cross_entropy_with_logits(model(r.to(dtype), j.to(dtype)).float(), f.to(r.dtype))
        model.zero_grad()
        loss.backward()
        for acc, p in zip(main_grads, model.parameters()):
            acc.add_(p.grad.to(acc.dtype), alpha=1 / ACCUMULATE)
        total += loss.item() / ACCUMULATE
    for main, acc in zip(main_params, main_grads):
        main.grad = acc
    optimizer.step()
    with torch.no_grad():
        for main, acc, p in zip(main_params, main_grads, model.parameters()):
            p.copy_(main)
            acc.zero_()
    print(f"step {step} loss {total:.4f}")
