"""Style transfer network with Gram matrix losses in FP16 autocast."""

import torch
import torch.nn.functional as F
from torch import nn


class Extractor(nn.Module):
    """Stands in for a pretrained VGG: fixed weights."""

    def __init__(self):
        super().__init__()
        self.block1 = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.ReLU())
        self.block2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU())

    def forward(self, image):
        # 0..255 pixels, as the Caffe weights expect
        low = self.block1(image * 255 - 115)
        return low, self.block2(low)


class Stylizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.ReLU(), nn.Conv2d(16, 3, 5, padding=2))

    def forward(self, image):
        return torch.sigmoid(self.net(image))


def gram(features):
    b, c, h, w = features.shape
    flat = features.view(b, c, h * w)
    return torch.bmm(flat, flat.transpose(1, 2)) / (c * h * w)


torch.manual_seed(0)
extractor = Extractor().requires_grad_(False).eval()
stylizer = Stylizer()
optimizer = torch.optim.Adam(stylizer.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu")
style = [gram(f) for f in extractor(torch.rand(1, 3, 32, 32))]

for step in range(8):
    content = torch.rand(2, 3, 32, 32)
    with torch.autocast("cpu", dtype=torch.float16):
        features = extractor(stylizer(content))
        loss = sum(F.mse_loss(gram(f).float(), s.expand(2, -1, -1)) for f, s in zip(features, style))
    scaler.scale(1e-4 * loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(step, loss.item(), scaler.get_scale())
