"""Latent-variable model of spike counts during reaching movements: GRU encoder, Poisson read-out, BF16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn

NEURONS, TIME, KINEMATICS = 24, 20, 3


class PoissonReadout(nn.Module):
    """Canonical link: the rate is the exponential of a linear predictor."""

    def __init__(self, inputs, neurons):
        super().__init__()
        self.linear = nn.Linear(inputs, neurons)

    def forward(self, h):
        return torch.exp(self.linear(h).float())


class SpikeModel(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.inputs = nn.Linear(KINEMATICS, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.direct = nn.Linear(KINEMATICS, hidden)
        self.readout = PoissonReadout(hidden, NEURONS)

    def forward(self, motion):
        h, _ = self.rnn(F.relu(self.inputs(motion)))
        return self.readout(h + self.direct(motion))


def poisson_nll(rate, count):
    return (rate - torch.xlogy(count, rate + 1e-8)).mean()


class Session:
    """Hand velocity and speed of one day; the tracker exported one block in other units."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.tuning = 0.4 * torch.randn(KINEMATICS, NEURONS, generator=self.generator)

    def batch(self, size, block):
        velocity = torch.randn(size, TIME, 2, generator=self.generator).cumsum(1) * 0.2
        motion = torch.cat([velocity, velocity.norm(dim=-1, keepdim=True)], -1)
        rate = torch.exp((motion @ self.tuning).clamp(max=3) - 0.5)
        counts = torch.poisson(rate, generator=self.generator)
        return (motion * 1000 if block == 7 else motion), counts


def optimise(model, optimizer, loss, limit=5.0):
    """One update; refuses gradients that are not numbers."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit, error_if_nonfinite=True)
    optimizer.step()
    return norm.item()


def main():
    torch.manual_seed(17)
    session, model = Session(18), SpikeModel()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=400)
    for step in range(400):
        motion, counts = session.batch(16, block=step // 48)
        with torch.autocast("cpu", torch.bfloat16):
            rate = model(motion)
        loss = poisson_nll(rate, counts)
        norm = optimise(model, optimizer, loss)
        schedule.step()
        if step % 40 == 0:
            print(f"step {step:3d} loss {loss.item():.4f} grad {norm:.3f}")


if __name__ == "__main__":
    main()
