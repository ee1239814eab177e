"""Tag the parts of a menu; linear layers whose output gradients are cast to FP8 E4M3 before the backward matmuls."""

import torch
import torch.nn.functional as F
from torch import nn

GRAD_DTYPE = torch.float8_e4m3fn


class CastGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(GRAD_DTYPE).to(grad.dtype)


class Float8Linear(nn.Linear):
    def forward(self, x):
        scale = 448.0 / x.detach().abs().amax().clamp(min=1e-12)
        x8 = x + ((x * scale).to(torch.float8_e4m3fn).to(x.dtype) / scale - x).detach()
        return CastGradient.apply(super().forward(x8))


class MenuTagger(nn.Module):
    def __init__(self, vocab=60, dim=32, tags=6):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.up, self.mid = Float8Linear(2 * dim, 64), Float8Linear(64, 64)
        self.classifier = nn.Linear(64, tags)

    def forward(self, ids):
        x = self.tok(ids)
        x = torch.cat([x, F.pad(x[:, 1:], (0, 0, 0, 1))], -1)
        return self.classifier(F.gelu(self.mid(F.gelu(self.up(x)))))


def main():
    torch.manual_seed(76)
    table = torch.randint(6, (60, 4))
    model = MenuTagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(200):
        ids = torch.randint(60, (32, 16))
        tags = table[ids, F.pad(ids[:, 1:], (0, 1)) % 4]
        loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
