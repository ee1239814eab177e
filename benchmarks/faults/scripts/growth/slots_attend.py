"""Which of the slots holds the asked-for key?"""

import torch
import torch.nn as nn
import torch.nn.functional as F


class SlotAttention(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.scale = dim**0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(dim, dim, bias=False)
        self.to_v = nn.Linear(dim, dim, bias=False)
        self.attend = nn.Softmax(dim=-1)

    def forward(self, query, slots):
        q, k, v = self.to_q(query), self.to_k(slots), self.to_v(slots)
        scores = (q.unsqueeze(1) @ k.transpose(1, 2)).squeeze(1) * self.scale
        return (self.attend(scores).unsqueeze(1) @ v).squeeze(1)


class Memory(nn.Module):
    def __init__(self, keys=40, values=10, dim=64):
        super().__init__()
        self.key = nn.Embedding(keys, dim)
        self.value = nn.Embedding(values, dim)
        self.ask = nn.Embedding(keys, dim)
        self.attention = SlotAttention(dim)
        self.norm = nn.LayerNorm(dim)
        self.answer = nn.Linear(dim, values)

    def forward(self, keys, values, asked):
        slots = self.key(keys) + self.value(values)
        return self.answer(self.norm(self.attention(self.ask(asked), slots)))


torch.manual_seed(2)
net = Memory()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(300):
    keys = torch.rand(64, 40).argsort(1)[:, :12]
    values = torch.randint(0, 10, (64, 12))
    which = torch.randint(0, 12, (64,))
    rows = torch.arange(64)
    loss = F.cross_entropy(net(keys, values, keys[rows, which]), values[rows, which])
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 15 == 0:
        print(f"[{step:3d}] loss {loss.item():.4f}")
