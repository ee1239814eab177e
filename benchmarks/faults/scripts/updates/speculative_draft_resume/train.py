"""Trains a drafter in two jobs: the first is cut off by the queue, the second goes on from its last checkpoint."""

import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from checkpoint import from_pretrained, save_pretrained
from draft import DraftModel, Target, VOCAB

torch.manual_seed(2322)
target = Target().requires_grad_(False)
PEAK_LR, TOTAL, CUT = 3e-3, 320, 80


def schedule(step):
    return 2e-4 + (PEAK_LR - 2e-4) * max(0.0, 1 - step / CUT)


class MasterWeights:
    def __init__(self, params):
        self.params = list(params)
        self.copies = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.opt = torch.optim.AdamW(self.copies, lr=PEAK_LR, weight_decay=0.0)
        self.param_groups = self.opt.param_groups

    def step(self):
        for c, p in zip(self.copies, self.params):
            c.grad = p.grad.float()
        self.opt.step()
        with torch.no_grad():
            for c, p in zip(self.copies, self.params):
                p.copy_(c)


def run(model, opt, start, stop):
    for step in range(start, stop):
        opt.param_groups[0]["lr"] = schedule(step)
        hidden, logits = target(torch.randint(VOCAB, (24, 12)))
        drafted = model(hidden.to(torch.bfloat16))
        loss = F.kl_div(drafted.float().log_softmax(-1), logits.log_softmax(-1), log_target=True, reduction="none")
        loss = loss.sum(-1).mean()
        model.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 4:
            print(f"step {step} loss {loss.item():.4f}")


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "draft.pt")
    draft = DraftModel().to(torch.bfloat16)
    run(draft, MasterWeights(draft.parameters()), 0, CUT)
    save_pretrained(draft, path)
    draft = from_pretrained(DraftModel, path)
    opt = torch.optim.AdamW(draft.parameters(), lr=PEAK_LR, weight_decay=0.0)
    run(draft, opt, CUT, TOTAL)
