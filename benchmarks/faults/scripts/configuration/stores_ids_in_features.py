"""Sales of 900 shops: the shop's number is a column of the BF16 feature matrix, and becomes an index again in the model."""

import torch
import torch.nn.functional as F
from torch import nn

SHOPS = 900


class ShopModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.shop = nn.Embedding(SHOPS + 4, 8)
        self.layers = nn.Sequential(nn.Linear(11, 32), nn.GELU(), nn.Linear(32, 1))

    def forward(self, features):
        number, rest = features[:, 0].long(), features[:, 1:]
        h = torch.cat([self.shop(number), rest.to(self.shop.weight.dtype)], 1)
        return self.layers(h).squeeze(1)


def dataset():
    level = torch.randn(SHOPS)
    number = torch.arange(SHOPS).repeat(4)
    weather = torch.randn(len(number), 3)
    sales = level[number] + 0.3 * weather[:, 0]
    features = torch.cat([number.unsqueeze(1).to(weather.dtype), weather], 1)
    return features.to(torch.bfloat16), sales


torch.manual_seed(3138)
features, sales = dataset()
model = ShopModel()
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
for epoch in range(8):
    for rows in torch.randperm(len(sales)).split(300):
        loss = F.mse_loss(model(features[rows]), sales[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.4f}")
