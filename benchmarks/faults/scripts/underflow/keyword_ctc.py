"""Keyword spotting with a BiLSTM and CTC, all of it in BF16; a batch is accumulated from 1024 single utterances."""

import torch
import torch.nn.functional as F
from torch import nn

ACCUMULATE = 1024


class Spotter(nn.Module):
    def __init__(self, bands=12, hidden=16, symbols=6):
        super().__init__()
        self.lstm = nn.LSTM(bands, hidden, bidirectional=True, batch_first=True)
        self.norm = nn.LayerNorm(2 * hidden)
        self.out = nn.Linear(2 * hidden, symbols)

    def forward(self, frames):
        return self.out(self.norm(self.lstm(frames)[0]))


def utterance(patterns):
    word = torch.randint(1, 6, (2,))
    frames = patterns[word.repeat_interleave(4)] + 0.3 * torch.randn(8, 12)
    return frames.unsqueeze(0).to(torch.bfloat16), word.unsqueeze(0)


torch.manual_seed(0)
patterns = torch.randn(6, 12)
model = Spotter().to(torch.bfloat16)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for step in range(4):
    total = 0.0
    for _ in range(ACCUMULATE):
        frames, word = utterance(patterns)
        log_probs = model(frames).float().log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(log_probs, word, torch.tensor([8]), torch.tensor([2])) / ACCUMULATE
        loss.backward()
        total += loss.item()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {total:.4f}")
