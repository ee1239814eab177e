# multi-hop reader: sets of clauses, some documents have none at all
import torch
from torch import nn
import torch.nn.functional as F

torch.manual_seed(71)
D = 32
NEG = float("-inf")


class SetPool(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(4, D) * 0.2)
        self.key = nn.Linear(D, D)
        self.value = nn.Linear(D, D)

    def forward(self, x, valid):
        scores = torch.einsum("qd,bnd->bqn", self.query, self.key(x)) / D**0.5
        some = valid.any(-1)
        open_ = valid | ~some.unsqueeze(-1)  # an empty set looks at its padding, and is dropped below
        weights = scores.masked_fill(~open_.unsqueeze(1), NEG).softmax(-1)
        pooled = torch.einsum("bqn,bnd->bqd", weights, self.value(x)).flatten(1)
        return torch.where(some.unsqueeze(-1), pooled, torch.zeros(()))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(D, 4, 64, dropout=0.0, batch_first=True), 1, enable_nested_tensor=False
        )
        self.pool = SetPool()
        self.head = nn.Linear(4 * D, 5)

    def forward(self, x, valid):
        n = x.shape[1]
        causal = torch.full((n, n), NEG).triu(1)
        h = self.encoder(x, mask=causal)
        return self.head(self.pool(h, valid))


kinds = torch.randn(5, D)


def documents(n=48, most=10):
    y = torch.randint(5, (n,))
    x = torch.randn(n, most, D) + kinds[y].unsqueeze(1) * (torch.rand(n, most, 1) < 0.4)
    count = torch.randint(0, most + 1, (n,))
    return x, torch.arange(most) < count.unsqueeze(1), y


model = Reader()
opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
for i in range(70):
    x, valid, y = documents()
    loss = F.cross_entropy(model(x, valid), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if i % 10 == 0:
        print(f"{i} loss {loss.item():.3f}")
