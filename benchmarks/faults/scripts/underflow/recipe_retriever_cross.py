import torch
import torch.nn as nn
import torch.nn.functional as F


class SelfAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class CrossAttention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q = nn.Linear(d, d, bias=False)
        self.k = nn.Linear(d, d, bias=False)
        self.v = nn.Linear(d, d)
        self.scale = d**0.5

    def forward(self, x, memory):
        score = torch.einsum("bqd,bkd->bqk", self.q(x), self.k(memory)) * self.scale
        return torch.einsum("bqk,bkd->bqd", score.softmax(-1), self.v(memory))


class Layer(nn.Module):
    def __init__(self, d, cross=False):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = SelfAttention(d)
        self.cross = CrossAttention(d) if cross else None
        self.ffn = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x, memory):
        x = x + self.attn(self.n1(x))
        if self.cross is not None:
            x = x + self.cross(x, memory)
        return x + self.ffn(self.n2(x))


class Reader(nn.Module):
    """Reads a question about a recipe; the ingredients (name, amount) are the memory."""

    def __init__(self, names=30, d=64):
        super().__init__()
        self.name = nn.Embedding(names, d)
        self.amount = nn.Linear(1, d, bias=False)
        self.layers = nn.ModuleList(Layer(d, cross=i == 2) for i in range(4))
        self.answer = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 1))

    def forward(self, question, items, amounts):
        x = self.name(question)
        memory = self.name(items) + self.amount(amounts[..., None])
        for layer in self.layers:
            x = layer(x, memory)
        return self.answer(x[:, 0]).squeeze(-1)


def recipes(n, names=30, length=10):
    items = torch.rand(n, names).argsort(1)[:, :length]
    amounts = torch.randn(n, length)
    which = torch.randint(length, (n, 1))
    words = torch.cat([items.gather(1, which), torch.randint(names, (n, 2))], 1)  # the asked one, then two distractors
    return words, items, amounts, amounts.gather(1, which)[:, 0]


torch.manual_seed(6)
net = Reader()
opt = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.98))
for step in range(200):
    q, items, amounts, target = recipes(64)
    loss = F.mse_loss(net(q, items, amounts), target)
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    opt.step()
    if step % 10 == 0:
        print(step, "loss", round(loss.item(), 4))
