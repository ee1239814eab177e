"""Fine-grained birds (toy): bilinear pooling with a signed square root, written as an autograd.Function to save memory."""

import torch
from torch import nn
from torch.nn import functional as F


class SignedRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.sign() * x.abs().sqrt()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return 0.5 * grad / y.abs()


class BilinearPool(nn.Module):
    def forward(self, fmap):
        b, c, h, w = fmap.shape
        flat = fmap.reshape(b, c, h * w)
        gram = torch.bmm(flat, flat.transpose(1, 2)) / (h * w)
        return F.normalize(SignedRoot.apply(gram.flatten(1)), dim=1)


class Birds(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.LeakyReLU(0.1))
        self.body = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, stride=2), nn.BatchNorm2d(12))
        self.pool = BilinearPool()
        self.drop = nn.Dropout2d(0.02)
        self.fc = nn.Linear(144, classes)

    def forward(self, x):
        f = self.body(self.stem(x))
        return self.fc(self.pool(self.drop(f)))


torch.manual_seed(17)
kinds = torch.randn(5, 3, 1, 1)
model = Birds()
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
for epoch in range(30):
    y = torch.randint(5, (6,))
    x = kinds[y] + 0.5 * torch.randn(6, 3, 12, 12)
    loss = F.cross_entropy(model(x), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if epoch % 5 == 0:
        print("epoch", epoch, "loss", f"{loss.item():.4f}")
