"""Encoder-decoder transformer that reverses numbers; label smoothing, and some tokens are forbidden in the output."""

import torch
from torch import nn

PAD, BOS, EOS, DIGITS = 0, 1, 2, 10
VOCAB = 3 + DIGITS


class Reverser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.place = nn.Parameter(0.1 * torch.randn(12, width))
        self.core = nn.Transformer(width, 4, 1, 1, 64, dropout=0.0, batch_first=True)
        self.project = nn.Linear(width, VOCAB)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.size(1))
        s = self.embed(source) + self.place[: source.size(1)]
        t = self.embed(target) + self.place[: target.size(1)]
        logits = self.project(self.core(s, t, tgt_mask=mask))
        # never emit padding or a second beginning
        banned = torch.zeros(VOCAB)
        banned[[PAD, BOS]] = float("-inf")
        return logits + banned


def smoothed_nll(logits, target, smoothing=0.1):
    logp = torch.log_softmax(logits, -1)
    truth = torch.nn.functional.one_hot(target, VOCAB).float()
    allowed = torch.ones(VOCAB)
    allowed[[PAD, BOS]] = 0.0
    weights = (1 - smoothing) * truth + smoothing * allowed / allowed.sum()
    return -(weights * logp).sum(-1).mean()


torch.manual_seed(1)
net = Reverser()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(8):
    digits = torch.randint(3, VOCAB, (16, 8))
    target = torch.cat([torch.full((16, 1), BOS), digits.flip(1), torch.full((16, 1), EOS)], 1)
    loss = smoothed_nll(net(digits, target[:, :-1]), target[:, 1:])
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(step, loss.item())
