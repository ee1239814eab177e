"""A small GPT: Muon for the matrices of its blocks, AdamW for embeddings and head, trapezoidal schedule."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def newton_schulz(g, steps=5):
    x = g / (g.norm() + 1e-7)
    flip = x.shape[0] > x.shape[1]
    x = x.t() if flip else x
    for _ in range(steps):
        gram = x @ x.t()
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.t() if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(p.grad)
                update = newton_schulz(p.grad + group["momentum"] * buf)
                p.add_(update, alpha=-group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class Block(nn.Module):
    def __init__(self, d, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.fc, self.out = nn.Linear(d, 4 * d, bias=False), nn.Linear(4 * d, d, bias=False)
        nn.init.zeros_(self.proj.weight)
        nn.init.zeros_(self.out.weight)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(F.rms_norm(x, (d,))).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        q, k = F.rms_norm(q, (q.shape[-1],)), F.rms_norm(k, (k.shape[-1],))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.out(F.relu(self.fc(F.rms_norm(x, (d,)))).square())


class GPT(nn.Module):
    def __init__(self, vocab=32, d=32, context=24, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.lm_head = nn.Linear(d, vocab, bias=False)
        nn.init.zeros_(self.lm_head.weight)

    def forward(self, ids):
        x = F.rms_norm(self.wte(ids) + self.wpe.weight[: ids.shape[1]], (32,))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(F.rms_norm(x, (32,)))
        return 15 * torch.tanh(logits / 15)


def main():
    torch.manual_seed(7021)
    model = GPT()
    muon = Muon(list(model.blocks.parameters()))
    adamw = torch.optim.AdamW(
        [{"params": model.lm_head.parameters(), "lr": 4e-3}, {"params": [model.wte.weight, model.wpe.weight], "lr": 2e-2}],
        betas=(0.8, 0.95), eps=1e-10, weight_decay=0.0,
    )  # fmt: skip
    steps = 80
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda s: min(1.0, (steps - s) / 30)) for o in (muon, adamw)]
    grammar = torch.randint(32, (32, 2))
    for step in range(steps):
        ids = [torch.randint(32, (16,))]
        for _ in range(20):
            ids.append(grammar[ids[-1], (torch.rand(16) < 0.15).long()])
        ids = torch.stack(ids, 1)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for optimizer, schedule in zip((muon, adamw), schedules):
            optimizer.step()
            schedule.step()
        model.zero_grad(set_to_none=True)
        if step % 4 == 0:
            print(f"step:{step}/{steps} train_loss:{loss.item():.4f}")


main()
