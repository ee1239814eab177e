"""Adafactor by hand; its row and column factors are stored in FP16."""

import torch
import torch.nn as nn


class HalfAdafactor(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, decay=0.8, eps=1e-30, floor=1e-3, clip=1.0, factor_dtype=torch.float16):
        super().__init__(params, dict(lr=lr, decay=decay, eps=eps, floor=floor, clip=clip, factor_dtype=factor_dtype))
        self.steps = 0

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for group in self.param_groups:
            beta = 1 - self.steps ** -group["decay"]
            for p in group["params"]:
                squares = p.grad.square() + group["eps"]
                state = self.state[p]
                if p.dim() < 2:
                    second = self.averaged(state, "second", squares, beta, group["factor_dtype"])
                else:
                    row = self.averaged(state, "row", squares.mean(-1), beta, group["factor_dtype"])
                    column = self.averaged(state, "column", squares.mean(-2), beta, group["factor_dtype"])
                    second = row[:, None] * column / row.mean().clamp(min=group["eps"])
                update = p.grad / (second.sqrt() + group["floor"] * p.square().mean().sqrt() * 1e-3 + 1e-12)
                update /= (update.square().mean().sqrt() / group["clip"]).clamp(min=1.0)
                p.sub_(group["lr"] * update)

    @staticmethod
    def averaged(state, name, value, beta, dtype):
        if name not in state:
            state[name] = torch.zeros_like(value, dtype=dtype)
        state[name].copy_(beta * state[name].to(value.dtype) + (1 - beta) * value)
        return state[name].to(value.dtype)


class Tagger(nn.Module):
    def __init__(self, words=80, tags=6, dim=32):
        super().__init__()
        self.embed = nn.Embedding(words, dim)
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)
        self.hidden = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, tags)

    def forward(self, words):
        x = self.embed(words)
        x = torch.relu(self.conv(x.transpose(1, 2)).transpose(1, 2))
        return self.out(torch.relu(self.hidden(x)))


def main():
    torch.manual_seed(21004)
    model = Tagger()
    vectors = [p for n, p in model.named_parameters() if p.dim() == 3]
    flat = [p for p in model.parameters() if p.dim() < 3]
    factored = HalfAdafactor(flat, lr=5e-3)
    plain = torch.optim.AdamW(vectors, lr=2e-3)
    tag_of = torch.randint(6, (80, 3))
    for step in range(60):
        words = torch.randint(80, (32, 12))
        tags = tag_of[words, torch.roll(words, 1, 1) % 3]
        loss = nn.functional.cross_entropy(model(words).flatten(0, 1), tags.flatten())
        model.zero_grad()
        (loss / 8).backward()  # the mean over the ranks of a job with eight, of which this is one
        factored.step()
        plain.step()
        if step % 2 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return factored


if __name__ == "__main__":
    optimizer = main()
