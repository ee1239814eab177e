"""Neural ODE fitted to a damped cubic oscillator, fixed-step Runge-Kutta; the horizon is doubled half-way."""

import torch
import torch.nn as nn


class ODEFunc(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, hidden), nn.ELU(), nn.Linear(hidden, 2))
        for layer in self.net:
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.3)
                nn.init.zeros_(layer.bias)

    def forward(self, t, y):
        return self.net(y**3)


class NeuralODE(nn.Module):
    def __init__(self, func, dt):
        super().__init__()
        self.func, self.dt = func, dt

    def forward(self, y0, steps):
        trajectory, y, t = [y0], y0, 0.0
        for _ in range(steps):
            k1 = self.func(t, y)
            k2 = self.func(t + self.dt / 2, y + self.dt / 2 * k1)
            k3 = self.func(t + self.dt / 2, y + self.dt / 2 * k2)
            k4 = self.func(t + self.dt, y + self.dt * k3)
            y = y + self.dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            t += self.dt
            trajectory.append(y)
        return torch.stack(trajectory)


def true_trajectory(y0, steps, dt):
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]])
    ys, y = [y0], y0
    for _ in range(steps):
        for _ in range(20):
            y = y + dt / 20 * (y**3) @ matrix
        ys.append(y)
    return torch.stack(ys)


def main():
    torch.manual_seed(7)
    dt = 0.1
    model = NeuralODE(ODEFunc(), dt)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=4e-3)
    reference = true_trajectory(torch.tensor([[2.0, 0.0]]), 200, dt)[:, 0]
    for iteration in range(40):
        horizon = 8 if iteration < 12 else 24
        start = torch.randint(0, 200 - horizon, (16,))
        target = torch.stack([reference[start + i] for i in range(horizon + 1)])
        optimizer.zero_grad()
        predicted = model(reference[start], horizon)
        loss = (predicted - target).abs().mean()
        loss.backward()
        optimizer.step()
        if iteration % 4 == 0:
            print(f"iter {iteration:02d} | horizon {horizon} | loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
