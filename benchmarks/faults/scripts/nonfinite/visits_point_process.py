"""Recurrent marked temporal point process: when will a customer come again, and for what?"""

import torch
import torch.nn.functional as F
from torch import nn


class RMTPP(nn.Module):
    def __init__(self, marks=6, dim=32):
        super().__init__()
        self.mark = nn.Embedding(marks, 12)
        self.rnn = nn.GRU(13, dim, batch_first=True)
        self.past = nn.Linear(dim, 1)
        self.next_mark = nn.Linear(dim, marks)
        self.w = nn.Parameter(torch.tensor(0.1))

    def forward(self, gaps, marks):
        x = torch.cat([self.mark(marks), gaps.clamp(max=5).unsqueeze(-1)], -1)
        h, _ = self.rnn(x)
        return self.past(h).squeeze(-1), self.next_mark(h)


def log_density(past, w, gap):
    """log f(gap) of a Gompertz hazard exp(past + w gap), equation 12 of Du et al. 2016."""
    hazard = past + w * gap
    survived = (torch.exp(hazard) - torch.exp(past)) / w
    return hazard - survived


def nll(model, gaps, marks):
    past, scores = model(gaps[:, :-1], marks[:, :-1])
    when = log_density(past, model.w, gaps[:, 1:]).mean()
    what = F.cross_entropy(scores.flatten(0, 1), marks[:, 1:].flatten())
    return what - when


def sequences(n, length):
    marks = torch.randint(6, (n, length)).cumsum(1) % 6
    gaps = -torch.log(1 - 0.999 * torch.rand(n, length)) * (0.3 + 0.2 * marks)
    return gaps, marks


def main():
    torch.manual_seed(90)
    model = RMTPP()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for step in range(32):
        gaps, marks = sequences(16, 12)
        if step >= 21 and step % 3 == 0:
            gaps[3, 7] = 1210.0  # has been abroad
        loss = nll(model, gaps, marks)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if step % 4 == 0:
            print(f"step {step} nll {loss.item():.3f} w {model.w.item():.3f}")


if __name__ == "__main__":
    main()
