import torch
from torch import nn


class Conv(nn.Sequential):
    def __init__(self, i, o, stride=1):
        super().__init__(nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class QuiltNet(nn.Module):
    def __init__(self, width, depth, classes=8):
        super().__init__()
        self.stem = Conv(3, width, 2)
        self.body = nn.Sequential(*[Conv(width, width, 2 if i == 0 else 1) for i in range(depth)])
        self.head = nn.Linear(width, classes)

    def features(self, x):
        return self.body(self.stem(x)).mean((2, 3))

    def forward(self, x):
        return self.head(self.features(x))


class Average:
    """An average of the student's weights; its decay rises at the start."""

    def __init__(self, model, decay=0.99):
        self.decay, self.updates = decay, 0
        self.weights = {k: v.detach().clone() for k, v in model.state_dict().items()}

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for k, v in model.state_dict().items():
            if v.dtype.is_floating_point:
                self.weights[k].lerp_(v, 1 - decay)
            else:
                self.weights[k].copy_(v)
