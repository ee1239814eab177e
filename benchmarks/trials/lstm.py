"""An LSTM of two layers that forecasts a sum of sines, with gradients clipped."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_num_threads(1)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 24)
        self.lstm = nn.LSTM(24, 32, num_layers=2, batch_first=True)
        self.hidden, self.head = nn.Linear(32, 32), nn.Linear(32, 1)

    def forward(self, x):
        states, _ = self.lstm(self.embed(x))
        return self.head(torch.tanh(self.hidden(states)))


model = Forecaster()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
times = torch.arange(25.0)
for _step in range(60):
    speed, phase = 0.2 + torch.rand(16, 1), 6.28 * torch.rand(16, 1)
    series = (torch.sin(speed * times + phase) + 0.5 * torch.sin(2.7 * speed * times)).unsqueeze(-1)
    loss = (model(series[:, :-1]) - series[:, 1:]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
