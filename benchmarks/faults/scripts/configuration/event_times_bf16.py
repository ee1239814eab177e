"""Predicts the next kind of event from the times since earlier ones; batches are moved to BF16 as a whole."""

import torch
from torch import nn


def to(batch, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


class Elapsed(nn.Module):
    """Times between an event and the two before it."""

    def forward(self, times):
        one = times[:, 2:] - times[:, 1:-1]
        two = times[:, 2:] - times[:, :-2]
        return torch.stack([one, two], -1)


class EventModel(nn.Module):
    def __init__(self, kinds=3, dim=32):
        super().__init__()
        self.elapsed = Elapsed()
        self.kind = nn.Embedding(kinds, dim)
        self.time = nn.Linear(2, dim)
        self.hidden, self.out = nn.Linear(dim, dim), nn.Linear(dim, kinds)

    def forward(self, gaps, kinds):
        times = gaps.cumsum(1)
        x = self.kind(kinds[:, 2:]) + torch.tanh(self.time(self.elapsed(times)))
        return self.out(torch.relu(self.hidden(x)))


def log_of_machine(n, length=200):
    """Gaps of 0.2 to 2 seconds. A short gap is followed by kind 0, a long one by kind 2, most of the time."""
    gaps = 0.2 + 1.8 * torch.rand(n, length)
    wanted = (gaps > 0.8).long() + (gaps > 1.4).long()
    following = torch.where(torch.rand(n, length) < 0.1, torch.randint(3, (n, length)), wanted)
    kinds = torch.roll(following, 1, 1)
    return {"gaps": gaps, "kinds": kinds, "next": following[:, 2:]}


def training_step(model, batch):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch["gaps"], batch["kinds"])
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), batch["next"].flatten())


def main():
    torch.manual_seed(21016)
    model = EventModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(60):
        batch = to(log_of_machine(8), torch.bfloat16)
        loss = training_step(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 2 == 0:
            print(f"step {step} train_loss={loss.item():.4f}")
    return model, batch


if __name__ == "__main__":
    model, batch = main()
