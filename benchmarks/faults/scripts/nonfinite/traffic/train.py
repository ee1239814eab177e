"""Traffic speeds on a road graph: graph convolution and a GRU, trained on the masked MAPE that is reported in the end."""

import torch
from metrics import masked_mae, masked_mape
from torch import nn

NODES, HISTORY, HORIZON = 10, 12, 3


class StandardScaler:
    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def transform(self, data):
        return (data - self.mean) / self.std

    def inverse_transform(self, data):
        return data * self.std + self.mean


class GraphConv(nn.Module):
    def __init__(self, cin, cout, supports):
        super().__init__()
        self.register_buffer("supports", supports)
        self.linear = nn.Linear(2 * cin, cout)

    def forward(self, x):
        spread = torch.einsum("nm,btmc->btnc", self.supports, x)
        return torch.relu(self.linear(torch.cat([x, spread], -1)))


class STModel(nn.Module):
    def __init__(self, supports, hidden=24):
        super().__init__()
        self.start = GraphConv(1, hidden, supports)
        self.second = GraphConv(hidden, hidden, supports)
        self.gru = nn.GRU(hidden, hidden, batch_first=True)
        self.end = nn.Linear(hidden, HORIZON)

    def forward(self, x):
        h = self.second(self.start(x.unsqueeze(-1)))
        b, t, n, c = h.shape
        _, last = self.gru(h.permute(0, 2, 1, 3).reshape(b * n, t, c))
        return self.end(last[0]).view(b, n, HORIZON).transpose(1, 2)


def simulate(steps):
    clock = torch.arange(steps).float()
    speeds = 58 - 14 * torch.exp(-(((clock % 96) - 34) ** 2) / 60)[:, None] * (0.5 + torch.rand(NODES))
    speeds = speeds + torch.randn(steps, NODES)
    speeds[330:336, 4] = 0.0  # one detector is serviced
    return speeds


class Engine:
    def __init__(self, scaler, supports, lrate, wdecay):
        self.model = STModel(supports)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=lrate, weight_decay=wdecay)
        self.loss = masked_mape
        self.scaler = scaler
        self.clip = 5

    def train(self, x, real):
        self.model.train()
        self.optimizer.zero_grad()
        predict = self.scaler.inverse_transform(self.model(x))
        loss = self.loss(predict, real)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        return loss.item(), masked_mae(predict.detach(), real).item()


def main():
    torch.manual_seed(99)
    speeds = simulate(500)
    adjacency = torch.eye(NODES).roll(1, 0) + torch.eye(NODES).roll(-1, 0)
    seen = speeds[:320]
    scaler = StandardScaler(seen[seen != 0].mean(), seen[seen != 0].std())
    engine = Engine(scaler, adjacency / 2, lrate=2e-3, wdecay=1e-4)
    for i, start in enumerate(range(0, 480 - HISTORY - HORIZON, 11)):  # in the order of time, as the readings came
        window = [speeds[s : s + HISTORY + HORIZON] for s in range(start, start + 11)]
        batch = torch.stack(window)
        metrics = engine.train(scaler.transform(batch[:, :HISTORY]), batch[:, HISTORY:])
        if i % 5 == 0:
            print(f"Iter: {i:03d}, Train MAPE: {metrics[0]:.4f}, Train MAE: {metrics[1]:.4f}")


if __name__ == "__main__":
    main()
