import torch
from torch import nn

torch.manual_seed(0)


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x):
        x = x.float()
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).square().mean(-1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance.clamp(min=0) + 1e-3) * self.gain


class Model(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, width), Norm(width), nn.Linear(width, width)
        self.head = nn.Linear(width, 4)
        with torch.no_grad():
            self.first.bias += 4.0  # features with a mean

    def forward(self, x):
        return self.head(nn.functional.gelu(self.second(self.norm(self.first(x)))))


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(8):
    x = torch.randn(64, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(model(x).float(), x[:, :4])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
