"""Truncated backpropagation through time over one long tide gauge record: the state is carried, and detached."""

import torch
import torch.nn as nn


class TideRNN(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.lstm = nn.LSTM(1, hidden, 2, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x, state=None):
        h, state = self.lstm(x, state)
        return self.out(h), state


def record(stations, length):
    t = torch.arange(length).unsqueeze(0)
    phase = 6.28 * torch.rand(stations, 1)
    level = torch.sin(t / 2.0 + phase) + 0.5 * torch.sin(t / 3.7 + 2 * phase) + 0.3 * torch.sin(t / 21.0)
    return (level + 0.05 * torch.randn(stations, length)).unsqueeze(-1)


@torch.no_grad()
def validate(model, series):
    model.eval()
    prediction, _ = model(series[:, :-1])
    model.train()
    return nn.functional.mse_loss(prediction[:, 20:], series[:, 21:]).item()


def main(chunk=20):
    torch.manual_seed(7031)
    train, val = record(16, 20 * chunk + 1), record(8, 81)
    model = TideRNN()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(4):
        state = None
        for i in range(0, train.shape[1] - 1, chunk):
            x, y = train[:, i : i + chunk], train[:, i + 1 : i + chunk + 1]
            prediction, state = model(x, state)
            state = tuple(s.detach() for s in state)
            loss = nn.functional.mse_loss(prediction, y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            if i % (4 * chunk) == 0:
                print(f"epoch {epoch} chunk {i // chunk:2d} loss {loss.item():.5f}")
        print(f"epoch {epoch} validation {validate(model, val):.5f}")


main()
