"""BiLSTM-CRF tagger. PAD may follow nothing but itself, and nothing may become PAD."""

import torch
from crf import CRF
from torch import nn

TAGS = ["O", "B", "I", "PAD"]
FORBIDDEN = [
    ("O", "I"),
    ("O", "PAD"),
    ("B", "PAD"),
    ("I", "PAD"),
    ("PAD", "O"),
    ("PAD", "B"),
    ("PAD", "I"),
    ("PAD", "PAD"),
]


class Tagger(nn.Module):
    def __init__(self, words=50, dim=24):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.lstm = nn.LSTM(dim, dim, bidirectional=True, batch_first=True)
        self.emit = nn.Linear(2 * dim, len(TAGS))
        self.crf = CRF(TAGS, FORBIDDEN)

    def forward(self, words, tags):
        return self.crf(self.emit(self.lstm(self.embed(words))[0]), tags)


torch.manual_seed(0)
tagger = Tagger()
optimizer = torch.optim.SGD(tagger.parameters(), lr=0.1)
for step in range(10):
    words = torch.randint(50, (8, 7))
    tags = (words % 5 == 0).long()
    loss = tagger(words, tags)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{step}: nll {loss.item():.3f}")
