"""ArcFace on a toy set with embeddings of two dimensions, to plot them on a circle."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.nn import Parameter


class ArcMarginProduct(nn.Module):
    """cos(theta + m)"""

    def __init__(self, in_features, out_features, s=30.0, m=0.50, easy_margin=False):
        super(ArcMarginProduct, self).__init__()
        self.s = s
        self.weight = Parameter(torch.FloatTensor(out_features, in_features))
        nn.init.xavier_uniform_(self.weight)
        self.easy_margin = easy_margin
        self.cos_m, self.sin_m = math.cos(m), math.sin(m)
        self.th = math.cos(math.pi - m)
        self.mm = math.sin(math.pi - m) * m

    def forward(self, input, label):
        cosine = F.linear(F.normalize(input), F.normalize(self.weight))
        sine = torch.sqrt(1.0 - torch.pow(cosine, 2))
        phi = cosine * self.cos_m - sine * self.sin_m
        if self.easy_margin:
            phi = torch.where(cosine > 0, phi, cosine)
        else:
            phi = torch.where(cosine > self.th, phi, cosine - self.mm)
        one_hot = torch.zeros(cosine.size())
        one_hot.scatter_(1, label.view(-1, 1).long(), 1)
        return ((one_hot * phi) + ((1.0 - one_hot) * cosine)) * self.s


class LeNetEmbedding(nn.Module):
    def __init__(self, dim=2):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.PReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.PReLU(),
            nn.MaxPool2d(2),
        )
        self.fc = nn.Linear(16 * 3 * 3, dim)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


if __name__ == "__main__":
    torch.manual_seed(2018)
    classes, size = 3, 12
    prototypes = torch.rand(classes, 1, size, size)
    backbone = LeNetEmbedding()
    metric_fc = ArcMarginProduct(2, classes, s=16, m=0.3)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(
        [{"params": backbone.parameters()}, {"params": metric_fc.parameters()}],
        lr=0.05,
        momentum=0.9,
        weight_decay=5e-4,
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.1)
    for i in range(60):
        label = torch.randint(classes, (32,))
        data = prototypes[label] + 0.05 * torch.randn(32, 1, size, size)
        feature = backbone(data)
        output = metric_fc(feature, label)
        loss = criterion(output, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        if i % 10 == 0:
            acc = (
                (F.linear(F.normalize(feature), F.normalize(metric_fc.weight)).argmax(1) == label).float().mean().item()
            )
            print(f"iter {i} loss {loss.item():.4f} acc {acc:.3f}")
