# next-move model; matrices are updated with orthogonalised momentum, the rest with Adam
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(202)
V, T, D = 50, 20, 48
rule = torch.randint(V, (V, 3))


def games(n):
    ids = torch.randint(V, (n, T + 1))
    for t in range(1, T + 1):
        ids[:, t] = rule[ids[:, t - 1], (torch.rand(n) < 0.15).long()]
    return ids


@torch.no_grad()
def orthogonal(g, steps=5):
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.t() if flip else x
    for _ in range(steps):
        a = x @ x.t()
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.t() if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                direction = orthogonal(p.grad.lerp(buffer, group["momentum"]))
                p.add_(direction, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D, bias=False)
        self.up, self.down = nn.Linear(D, 4 * D, bias=False), nn.Linear(4 * D, D, bias=False)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.down.weight)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (D,))).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
        q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, D))
        return x + self.down(F.relu(self.up(F.rms_norm(x, (D,)))).square())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.blocks = nn.Embedding(V, D), nn.Sequential(*(Block() for _ in range(3)))
        self.head = nn.Linear(D, V, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, ids):
        x = F.rms_norm(self.emb(ids), (D,))
        return 15 * torch.tanh(self.head(F.rms_norm(self.blocks(x), (D,))) / 15)


STEPS = 90
net = GPT()
muon = Muon(net.blocks.parameters(), lr=0.05)
adam = torch.optim.Adam([*net.emb.parameters(), *net.head.parameters()], lr=0.02, betas=(0.8, 0.95))
schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, 1.5 * (1 - s / STEPS))) for o in (muon, adam)]
for step in range(STEPS):
    ids = games(16)
    loss = F.cross_entropy(net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    net.zero_grad()
    loss.backward()
    muon.step()
    adam.step()
    for s in schedules:
        s.step()
    if step % 2 == 0:
        print(f"{step} loss {loss.item():.4f}")
