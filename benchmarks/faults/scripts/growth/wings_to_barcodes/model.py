import torch
import torch.nn.functional as F
from torch import nn


class WingEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GELU()
        )
        self.project = nn.Linear(32 * 16, dim)

    def forward(self, wing):
        return self.project(self.conv(wing).flatten(1))


class BarcodeEncoder(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.bases = nn.Embedding(4, 16)
        self.conv = nn.Conv1d(16, 48, 5, padding=2)
        self.project = nn.Sequential(nn.Linear(48 * 4, 64), nn.GELU(), nn.Linear(64, dim))

    def forward(self, barcode):
        x = F.gelu(self.conv(self.bases(barcode).transpose(1, 2)))
        return self.project(F.adaptive_max_pool1d(x, 4).flatten(1))


class WingBarcode(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.wing, self.barcode = WingEncoder(dim), BarcodeEncoder(dim)
        self.log_scale = nn.Parameter(torch.tensor(2.6593))  # exp of it is 1 / 0.07

    def forward(self, wing, barcode):
        a = F.normalize(self.wing(wing), dim=1)
        b = F.normalize(self.barcode(barcode), dim=1)
        return self.log_scale.exp() * a @ b.t()


def symmetric_loss(logits):
    target = torch.arange(len(logits))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2
