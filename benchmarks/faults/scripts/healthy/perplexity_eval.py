"""A language model whose early validation perplexity is infinite: exp overflows in the metric, not in training."""

import torch
from torch import nn
from torch.nn import functional as F


class LSTMModel(nn.Module):
    def __init__(self, vocab=30, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.lstm = nn.LSTM(dim, dim, num_layers=2, batch_first=True, dropout=0.2)
        self.out = nn.Linear(dim, vocab)

    def forward(self, tokens):
        return self.out(self.lstm(self.embed(tokens))[0])


@torch.no_grad()
def validate(model, tokens):
    model.eval()
    nll = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    per_sequence = nll.view(len(tokens), -1).sum(1).exp()  # of the whole sequence, so astronomically large
    model.train()
    return per_sequence.mean()


torch.manual_seed(0)
model = LSTMModel()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
best = torch.tensor(float("inf"))
held_out = torch.randint(30, (4, 33))
for step in range(16):
    tokens = (torch.randint(30, (8, 1)) + torch.arange(17)) % 30
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    if step % 4 == 0:
        perplexity = validate(model, held_out)
        best = torch.minimum(best, perplexity)
        print(f"step {step}: loss {loss.item():.3f}, sequence perplexity {perplexity.item()}, best {best.item()}")
