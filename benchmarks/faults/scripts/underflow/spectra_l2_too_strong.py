"""Chemical spectra, few of them: against overfitting Adam gets weight_decay=1, and every layer goes to zero."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SpectrumNet(nn.Module):
    def __init__(self, bands=60, classes=5):
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv1d(1, 12, 7, stride=2, padding=3), nn.ELU())
        self.block2 = nn.Sequential(nn.Conv1d(12, 24, 5, stride=2, padding=2), nn.ELU())
        self.block3 = nn.Sequential(nn.Conv1d(24, 24, 3, stride=2, padding=1), nn.ELU())
        self.hidden = nn.Linear(24 * 8, 48)
        self.out = nn.Linear(48, classes)

    def forward(self, x):
        x = self.block3(self.block2(self.block1(x.unsqueeze(1))))
        return self.out(nn.functional.elu(self.hidden(x.flatten(1))))


def spectra(n, bands=60):
    grid = torch.linspace(0, 1, bands)
    label = torch.randint(5, (n,))
    peaks = torch.rand(5, 3)
    x = torch.zeros(n, bands)
    for k in range(3):
        x += torch.exp(-(((grid - peaks[label, k : k + 1]) / 0.03) ** 2))
    x = x * (0.7 + 0.6 * torch.rand(n, 1)) + 0.15 * torch.randn(n, bands)
    return TensorDataset((x - x.mean()) / x.std(), label)


def fit(model, loader, optimizer, epochs):
    history = []
    for epoch in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            history.append(loss.item())
        print(f"epoch {epoch:2d}  loss {sum(history[-len(loader) :]) / len(loader):.4f}")


torch.manual_seed(613)
loader = DataLoader(spectra(480), batch_size=32, shuffle=True)
model = SpectrumNet()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1.0)
fit(model, loader, optimizer, epochs=12)
