"""Speaker classification: frames are pooled with learnt attention weights over 4000 frames; FP16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn

FRAMES, COEFFICIENTS, SPEAKERS = 2000, 12, 6


class AttentivePooling(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hidden = nn.Linear(width, 16)
        self.score = nn.Linear(16, 1)

    def forward(self, h):
        scores = self.score(torch.tanh(self.hidden(h))).squeeze(-1)
        weights = scores.half().softmax(-1)
        return torch.bmm(weights.unsqueeze(1), h).squeeze(1)


class SpeakerNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.frame = nn.Linear(COEFFICIENTS, width)
        self.pool = AttentivePooling(width)
        self.speaker = nn.Linear(width, SPEAKERS)

    def forward(self, x):
        h = torch.tanh(self.frame(x))
        return self.speaker(self.pool(h))


class Corpus:
    """Only one frame in fifty is voiced and tells who speaks; the last coefficient is its energy."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.voices = torch.randn(SPEAKERS, COEFFICIENTS - 1, generator=self.g)

    def __call__(self, n):
        y = torch.randint(0, SPEAKERS, (n,), generator=self.g)
        x = 0.6 * torch.randn(n, FRAMES, COEFFICIENTS, generator=self.g)
        voiced = (torch.rand(n, FRAMES, generator=self.g) < 0.02).unsqueeze(-1)
        x[..., :-1] = torch.where(voiced, self.voices[y].unsqueeze(1), x[..., :-1])
        x[..., -1:] = torch.where(voiced, 2.0, -1.0)
        return x, y


def run(steps=50):
    torch.manual_seed(3106)
    net, corpus = SpeakerNet(), Corpus(6)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2, eps=1e-10)
    for step in range(steps):
        x, y = corpus(8)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = net(x)
        loss = F.cross_entropy(logits.float(), y)
        optimizer.zero_grad()
        (1e-3 * loss).backward()  # one of several tasks
        optimizer.step()
        if step % 4 == 3:
            print("step", step + 1, "loss", round(loss.item(), 4))


run()
