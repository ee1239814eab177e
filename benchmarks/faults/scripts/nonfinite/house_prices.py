"""Linear regression of house prices on four columns of a listing, as they are in the file."""

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(42)
np.random.seed(42)

# area in square feet, bedrooms, year built, lot size in square feet
n = 480
area = np.random.uniform(600, 3200, n)
bedrooms = np.random.randint(1, 6, n)
year = np.random.randint(1940, 2020, n)
lot = area * np.random.uniform(1.2, 2.0, n)
price = 0.11 * area + 9.0 * bedrooms + 0.6 * (year - 1940) + 0.01 * lot + np.random.randn(n) * 12  # thousands

X = torch.tensor(np.stack([area, bedrooms, year, lot], 1), dtype=torch.float32)
Y = torch.tensor(price, dtype=torch.float32).view(-1, 1)
loader = DataLoader(TensorDataset(X, Y), batch_size=32, shuffle=True)


class LinearRegression(nn.Module):
    def __init__(self, input_dim, output_dim):
        super().__init__()
        self.linear = nn.Linear(input_dim, output_dim)

    def forward(self, x):
        return self.linear(x)


model = LinearRegression(4, 1)
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=2e-5)

losses = []
for epoch in range(3):
    for inputs, labels in loader:
        optimizer.zero_grad()
        outputs = model(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("epoch {}, loss {}".format(epoch + 1, losses[-1]))
