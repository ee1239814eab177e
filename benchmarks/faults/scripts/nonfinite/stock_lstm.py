"""Next day's close of a stock with an LSTM on price, volume and moving averages."""

import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

LOOKBACK = 20


def load_prices(days=420, seed=0):
    rng = np.random.default_rng(seed)
    close = 100 * np.exp(np.cumsum(rng.normal(0.0005, 0.012, days)))
    df = pd.DataFrame({"Close": close, "Volume": rng.integers(1_000_000, 9_000_000, days)})
    df["MA5"] = df["Close"].rolling(5).mean()
    df["MA10"] = df["Close"].rolling(10).mean()
    df["Volatility"] = df["Close"].rolling(10).std()
    return (df - df.min()) / (df.max() - df.min())


class StockDataset(Dataset):
    def __init__(self, df):
        self.values = df.values.astype(np.float32)

    def __len__(self):
        return len(self.values) - LOOKBACK

    def __getitem__(self, i):
        return torch.from_numpy(self.values[i : i + LOOKBACK]), torch.tensor(self.values[i + LOOKBACK, 0])


class LSTM(nn.Module):
    def __init__(self, input_dim, hidden_dim, num_layers, output_dim):
        super(LSTM, self).__init__()
        self.hidden_dim = hidden_dim
        self.num_layers = num_layers
        self.lstm = nn.LSTM(input_dim, hidden_dim, num_layers, batch_first=True)
        self.fc = nn.Linear(hidden_dim, output_dim)

    def forward(self, x):
        h0 = torch.zeros(self.num_layers, x.size(0), self.hidden_dim)
        c0 = torch.zeros(self.num_layers, x.size(0), self.hidden_dim)
        out, (hn, cn) = self.lstm(x, (h0.detach(), c0.detach()))
        return self.fc(out[:, -1, :]).squeeze(-1)


if __name__ == "__main__":
    torch.manual_seed(21)
    df = load_prices()
    split = int(len(df) * 0.85)
    train_loader = DataLoader(StockDataset(df[:split]), batch_size=8, shuffle=True)
    model = LSTM(input_dim=df.shape[1], hidden_dim=24, num_layers=2, output_dim=1)
    criterion = nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
    for epoch in range(1):
        hist = []
        for xb, yb in train_loader:
            y_pred = model(xb)
            loss = criterion(y_pred, yb)
            hist.append(loss.item())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print("Epoch", epoch, "MSE:", np.mean(hist))
