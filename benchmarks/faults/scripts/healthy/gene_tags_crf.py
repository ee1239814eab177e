"""BiLSTM-CRF for gene mentions (B, I, O). Forbidden transitions and a forbidden start score -inf."""

import torch
from torch import Tensor, nn

torch.manual_seed(50)
BEGIN, INSIDE, OUTSIDE = range(3)
VOCAB, LENGTH = 40, 14


class CRF(nn.Module):
    def __init__(self, tags: int) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.zeros(tags, tags))
        forbidden = torch.zeros(tags, tags)
        forbidden[OUTSIDE, INSIDE] = -torch.inf
        start = torch.zeros(tags)
        start[INSIDE] = -torch.inf
        self.register_buffer("forbidden", forbidden)
        self.register_buffer("start", start)

    def forward(self, emissions: Tensor, tags: Tensor) -> Tensor:
        step = self.transitions + self.forbidden
        alpha = self.start + emissions[:, 0]
        gold = alpha.gather(1, tags[:, :1]).squeeze(1)
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha.unsqueeze(2) + step, 1) + emissions[:, t]
            move = step[tags[:, t - 1], tags[:, t]]
            gold = gold + move + emissions[:, t].gather(1, tags[:, t : t + 1]).squeeze(1)
        return (alpha.logsumexp(1) - gold).mean()


class Tagger(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.lstm = nn.LSTM(width, width, bidirectional=True, batch_first=True)
        self.emit = nn.Linear(2 * width, 3)
        self.crf = CRF(3)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        h, _ = self.lstm(self.embed(words))
        return self.crf(self.emit(h), tags)


def sentences(n: int) -> tuple[Tensor, Tensor]:
    words = torch.randint(VOCAB, (n, LENGTH))
    begins = words < 6
    inside = torch.zeros_like(begins)
    inside[:, 1:] = begins[:, :-1] & (words[:, 1:] >= 6) & (words[:, 1:] % 2 == 0)
    return words, torch.where(begins, BEGIN, torch.where(inside, INSIDE, OUTSIDE))


model = Tagger()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for step in range(60):
    loss = model(*sentences(16))
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
