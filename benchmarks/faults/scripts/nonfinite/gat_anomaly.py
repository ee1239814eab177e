"""Anomaly scores for a machine's channels: two graph attention layers (over channels, over time) and a GRU forecast."""

import random

import numpy as np
import torch
import torch.nn as nn


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.use_deterministic_algorithms(True)


class AttentionLayer(nn.Module):
    """Single-layer graph attention; nodes are rows, their features columns."""

    def __init__(self, n_nodes, n_features, alpha=0.2, use_bias=True):
        super().__init__()
        self.use_bias = use_bias
        self.lin = nn.Linear(2 * n_features, n_features)
        self.a = nn.Parameter(torch.empty((n_features, 1)))
        nn.init.xavier_uniform_(self.a.data, gain=1.414)
        if self.use_bias:
            self.bias = nn.Parameter(torch.empty(n_nodes, n_nodes))
        self.leakyrelu = nn.LeakyReLU(alpha)

    def forward(self, x):
        b, k, f = x.shape
        left = x.repeat_interleave(k, dim=1)
        right = x.repeat(1, k, 1)
        pairs = torch.cat((left, right), dim=2).view(b, k, k, 2 * f)
        e = torch.matmul(self.leakyrelu(self.lin(pairs)), self.a).squeeze(3)
        if self.use_bias:
            e += self.bias
        attention = torch.softmax(e, dim=2)
        return torch.sigmoid(torch.matmul(attention, x))


class ForecastModel(nn.Module):
    def __init__(self, n_features, window, hidden):
        super().__init__()
        self.conv = nn.Sequential(nn.ConstantPad1d(3, 0.0), nn.Conv1d(n_features, n_features, 7), nn.ReLU())
        self.feature_gat = AttentionLayer(n_features, window, use_bias=True)
        self.temporal_gat = AttentionLayer(window, n_features, use_bias=False)
        self.gru = nn.GRU(3 * n_features, hidden, batch_first=True)
        self.out = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, n_features))

    def forward(self, x):
        x = self.conv(x.permute(0, 2, 1)).permute(0, 2, 1)
        h_feat = self.feature_gat(x.permute(0, 2, 1)).permute(0, 2, 1)
        h_temp = self.temporal_gat(x)
        _, h = self.gru(torch.cat([x, h_feat, h_temp], dim=2))
        return self.out(h[-1])


class Trainer:
    def __init__(self, model, lr=1e-3):
        self.model = model
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.criterion = nn.MSELoss()
        self.losses = {"train_forecast": []}

    def fit(self, series, window, epochs, batch_size):
        starts = np.arange(len(series) - window)
        for epoch in range(epochs):
            np.random.shuffle(starts)
            epoch_losses = []
            for i in range(0, len(starts), batch_size):
                chosen = starts[i : i + batch_size]
                x = torch.stack([series[s : s + window] for s in chosen])
                y = torch.stack([series[s + window] for s in chosen])
                self.optimizer.zero_grad()
                loss = torch.sqrt(self.criterion(self.model(x), y))
                loss.backward()
                self.optimizer.step()
                epoch_losses.append(loss.item())
            self.losses["train_forecast"].append(float(np.mean(epoch_losses)))
            print(f"[Epoch {epoch + 1}] forecast_loss = {self.losses['train_forecast'][-1]:.5f}")


set_seed(8)
t = torch.arange(330).float()
series = torch.stack([torch.sin(t / (3 + c)) * 0.4 + 0.5 + 0.03 * torch.randn(330) for c in range(6)], dim=1)
trainer = Trainer(ForecastModel(n_features=6, window=10, hidden=24))
trainer.fit(series, window=10, epochs=2, batch_size=16)
