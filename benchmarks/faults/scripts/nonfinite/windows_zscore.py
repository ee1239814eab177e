"""Activity recognition from accelerometer windows; every window is brought to zero mean and unit spread in the Dataset."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, n=320, length=50):
        g = torch.Generator().manual_seed(40)
        self.y = torch.randint(4, (n,), generator=g)
        t = torch.arange(length) / 10
        rate = (1.0 + self.y).view(-1, 1, 1)
        phase = 6 * torch.rand(n, 3, 1, generator=g)
        self.x = torch.sin(rate * t + phase) + 0.2 * torch.randn(n, 3, length, generator=g)
        self.x = (self.x * 512).round()
        # the device lay on a table, and reports nothing but its offset
        self.x[150, 1] = 17.0

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        w = self.x[i]
        w = (w - w.mean(-1, keepdim=True)) / w.std(-1, keepdim=True)
        return w, self.y[i]


class ConvLSTM(nn.Module):
    def __init__(self, hidden=32, classes=4):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(3, 16, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2))
        self.lstm = nn.LSTM(16, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, x):
        h, _ = self.lstm(self.conv(x).transpose(1, 2))
        return self.fc(h[:, -1])


torch.manual_seed(41)
model = ConvLSTM()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
loader = DataLoader(Windows(), batch_size=8)
accumulate = 2
for i, (x, y) in enumerate(loader):
    loss = criterion(model(x), y) / accumulate
    loss.backward()
    if (i + 1) % accumulate == 0:
        optimizer.step()
        optimizer.zero_grad()
    if i % 8 == 0:
        print(f"batch {i} loss {accumulate * loss.item():.4f}")
