"""An 8-bit Adam done with care: blocks of 64, the square root of the second moment is what is quantised, rounded upwards."""

import torch
import torch.nn.functional as F
from torch import nn

BLOCK = 64


def pack(x, signed):
    flat = F.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    top = flat.abs().amax(1, keepdim=True).clamp(min=1e-30)
    if signed:
        return (flat / top * 127).round().to(torch.int8), top
    return (flat / top * 255).ceil().clamp(min=1).to(torch.uint8), top


def unpack(codes, top, signed, like):
    return (codes.float() / (127 if signed else 255) * top).flatten()[: like.numel()].view_as(like)


class BlockAdam(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["t"] = 0
                    s["m"], s["root_v"] = pack(torch.zeros_like(p), True), pack(torch.zeros_like(p), False)
                s["t"] += 1
                m = unpack(*s["m"], True, p).lerp(p.grad, 1 - b1)
                v = unpack(*s["root_v"], False, p).square().mul(b2).addcmul(p.grad, p.grad, value=1 - b2)
                s["m"], s["root_v"] = pack(m, True), pack(v.sqrt(), False)
                step_size = group["lr"] / (1 - b1 ** s["t"])
                p.addcdiv_(m, (v / (1 - b2 ** s["t"])).sqrt() + group["eps"], value=-step_size)


class Tagger(nn.Module):
    def __init__(self, letters=26, d=24, tags=5):
        super().__init__()
        self.letters = nn.Embedding(letters, d)
        self.conv = nn.Conv1d(d, 2 * d, 3, padding=1)
        self.tags = nn.Linear(d, tags)

    def forward(self, text):
        h = F.glu(self.conv(self.letters(text).transpose(1, 2)), 1)
        return self.tags(h.transpose(1, 2))


torch.manual_seed(424)
model = Tagger()
kind = torch.randint(5, (26, 26))
optimizer = BlockAdam(model.parameters(), lr=8e-3)
for step in range(110):
    text = torch.randint(26, (16, 24))
    tag = kind[text, text.roll(1, 1)]
    tag[:, 0] = -100
    loss = F.cross_entropy(model(text).flatten(0, 1), tag.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
