"""Attitude from inertial data: an LSTM gives a quaternion, the loss compares roll, pitch and yaw with the log of a gimbal."""

import torch
import torch.nn as nn


class AttitudeNet(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.lstm = nn.LSTM(6, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 4)

    def forward(self, x):
        out, _ = self.lstm(x)
        delta = self.head(out[:, -1])
        return delta + torch.tensor([1.0, 0.0, 0.0, 0.0])


class EulerLoss(nn.Module):
    """Squared differences of the angles, each weighted."""

    def __init__(self, weights=(1.0, 1.0, 0.5)):
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights))

    @staticmethod
    def to_euler(q):
        w, x, y, z = q.unbind(-1)
        roll = torch.atan2(2 * (w * x + y * z), 1 - 2 * (x * x + y * y))
        pitch = torch.asin(2 * (w * y - z * x))
        yaw = torch.atan2(2 * (w * z + x * y), 1 - 2 * (y * y + z * z))
        return torch.stack([roll, pitch, yaw], -1)

    def forward(self, q, angles):
        return (self.weights * (self.to_euler(q) - angles) ** 2).sum(-1).mean()


class Flights(torch.utils.data.Dataset):
    """Windows of gyroscope and accelerometer readings; the later flights are aerobatic."""

    def __init__(self, n=480, length=12):
        g = torch.Generator().manual_seed(12)
        steepness = torch.linspace(0.15, 1.4, n).view(-1, 1)
        self.angles = steepness * torch.randn(n, 3, generator=g).clamp(-1.1, 1.1)
        rates = self.angles.unsqueeze(1) / length * torch.ones(1, length, 1)
        gravity = torch.stack([-self.angles[:, 1].sin(), self.angles[:, 0].sin(), self.angles[:, 1].cos()], -1)
        signal = torch.cat([rates * 4, gravity.unsqueeze(1).expand(-1, length, -1)], -1)
        self.signal = signal + 0.02 * torch.randn(n, length, 6, generator=g)

    def __len__(self):
        return len(self.angles)

    def __getitem__(self, i):
        return self.signal[i], self.angles[i]


def train():
    torch.manual_seed(3)
    model, criterion = AttitudeNet(), EulerLoss()
    loader = torch.utils.data.DataLoader(Flights(), batch_size=12)  # in the order they were flown
    optimizer = torch.optim.Adam(model.parameters(), lr=1.5e-2)
    for i, (signal, angles) in enumerate(loader):
        loss = criterion(model(signal), angles)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        if i % 8 == 0:
            print(f"batch {i} loss {loss.item():.4f}")


if __name__ == "__main__":
    train()
