"""Temporal convolutions with weight normalisation; a callback zeroes the filters that matter least, every few steps."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


class TemporalBlock(nn.Module):
    def __init__(self, cin, cout, dilation):
        super().__init__()
        self.pad = nn.ConstantPad1d((2 * dilation, 0), 0.0)
        self.conv1 = weight_norm(nn.Conv1d(cin, cout, 3, dilation=dilation))
        self.conv2 = weight_norm(nn.Conv1d(cout, cout, 3, dilation=dilation))
        self.down = nn.Conv1d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x):
        h = torch.relu(self.conv1(self.pad(x)))
        h = torch.relu(self.conv2(self.pad(h)))
        return torch.relu(h + self.down(x))


class TCN(nn.Module):
    def __init__(self, channels=(16, 16, 24)):
        super().__init__()
        sizes = (3, *channels)
        self.blocks = nn.Sequential(*(TemporalBlock(a, b, 2**i) for i, (a, b) in enumerate(zip(sizes, sizes[1:]))))
        self.out = nn.Linear(channels[-1], 1)

    def forward(self, x):
        return self.out(self.blocks(x)[:, :, -1]).squeeze(-1)


class FilterPruning:
    """Every ``every`` steps, zeroes the filters with the smallest directions."""

    def __init__(self, model, every=7, fraction=0.1):
        self.convs = [m for m in model.modules() if isinstance(m, nn.Conv1d) and hasattr(m, "parametrizations")]
        self.every, self.fraction = every, fraction

    @torch.no_grad()
    def on_step_end(self, step):
        if (step + 1) % self.every:
            return
        for conv in self.convs[1:]:  # never the first layer
            v = conv.parametrizations.weight.original1
            norms = v.flatten(1).norm(dim=1)
            k = max(1, int(self.fraction * len(norms)))
            v[norms.topk(k, largest=False).indices] = 0.0


class Trainer:
    def __init__(self, model, callbacks, lr=3e-3):
        self.model, self.callbacks = model, callbacks
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.loss = nn.L1Loss()

    def fit(self, batches):
        for step, (x, y) in enumerate(batches):
            loss = self.loss(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for callback in self.callbacks:
                callback.on_step_end(step)
            if step % 5 == 0:
                print(f"step {step} mae {loss.item():.4f}")


def series(steps, n=16, length=32):
    for _ in range(steps):
        walk = torch.randn(n, 3, length + 1).cumsum(-1) * 0.2
        yield walk[..., :-1], walk[:, 0, -1] - 0.5 * walk[:, 1, -4]


if __name__ == "__main__":
    torch.manual_seed(77)
    model = TCN()
    Trainer(model, [FilterPruning(model)]).fit(series(24))
