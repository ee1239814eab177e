import math

from torch import nn


def block(cin, cout, stride):
    return nn.Sequential(nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout), nn.ReLU())


def head(width, outputs):
    return nn.Sequential(
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, outputs, 3, padding=1),
    )


class GrapeDetector(nn.Module):
    """A one-level anchor-free detector: a score and four distances for every cell of a 12 x 12 grid."""

    def __init__(self, width=24):
        super().__init__()
        self.backbone = nn.Sequential(block(3, 16, 2), block(16, width, 2), block(width, width, 1))
        self.cls_head = head(width, 1)
        self.box_head = head(width, 4)

    def forward(self, image):
        x = self.backbone(image)
        return self.cls_head(x), self.box_head(x)


def init_prior(module, prior):
    """As for RetinaNet: small weights, and biases such that the first scores equal the prior."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.normal_(layer.weight, std=0.01)
            nn.init.constant_(layer.bias, -math.log((1 - prior) / prior))
