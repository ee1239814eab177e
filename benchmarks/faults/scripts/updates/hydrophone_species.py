# hydrophone clips -> species. The trunk normalises with its own layer because clips come in several lengths.
import torch
import torch.nn as nn
import torch.nn.functional as F


class MaskedNorm(nn.Module):
    """Per-channel normalisation over valid frames only, with running statistics for evaluation."""

    def __init__(self, ch, momentum=0.005, stats=torch.float32):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(ch))
        self.bias = nn.Parameter(torch.zeros(ch))
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(ch, dtype=stats))
        self.register_buffer("var", torch.ones(ch, dtype=stats))

    def forward(self, x, valid):
        if self.training:
            n = valid.sum()
            mean = (x * valid).sum((0, 1)) / n
            var = ((x - mean).square() * valid).sum((0, 1)) / n
            with torch.no_grad():
                self.mean.mul_(1 - self.momentum).add_((self.momentum * mean).to(self.mean.dtype))
                self.var.mul_(1 - self.momentum).add_((self.momentum * var).to(self.var.dtype))
        else:
            mean, var = self.mean.float(), self.var.float()
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.gain + self.bias


class Stage(nn.Module):
    def __init__(self, din, dout, stats):
        super().__init__()
        self.proj = nn.Linear(din, dout)
        self.norm = MaskedNorm(dout, stats=stats)

    def forward(self, x, valid):
        return F.relu(self.norm(self.proj(x), valid))


class Listener(nn.Module):
    def __init__(self, bands=20, species=6):
        super().__init__()
        kinds = [torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float32]
        dims = [bands, 32, 32, 48, 48, 32, 32]
        self.trunk = nn.ModuleList(Stage(a, b, k) for a, b, k in zip(dims, dims[1:], kinds))
        nn.init.constant_(self.trunk[3].proj.bias, 3.0)
        self.head = nn.Linear(32, species)

    def forward(self, x, valid):
        for stage in self.trunk:
            x = stage(x, valid)
        return self.head((x * valid).sum(1) / valid.sum(1))


def clips(prints, n):
    y = torch.randint(len(prints), (n,))
    frames = prints[y][:, None] + 1.3 * torch.randn(n, 12, prints.shape[1]) + 0.4
    valid = (torch.arange(12)[None] < torch.randint(5, 13, (n, 1))).float()[..., None]
    return frames, valid, y


@torch.no_grad()
def evaluate(model, data):
    model.eval()
    x, valid, y = data
    logits = model(x, valid)
    model.train()
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def main():
    torch.manual_seed(21)
    prints = 0.5 * torch.randn(6, 20)
    held_out = clips(prints, 400)
    model = Listener()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for step in range(1, 451):
        x, valid, y = clips(prints, 24)
        opt.zero_grad()
        F.cross_entropy(model(x, valid), y).backward()
        opt.step()
        if step % 50 == 0:
            loss, acc = evaluate(model, held_out)
            print(f"step {step} validation loss {loss:.4f} accuracy {acc:.3f}")
    return model


if __name__ == "__main__":
    trained = main()
