"""A vision transformer of torch's own encoder layers on images whose class is where the bright square is."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
torch.set_num_threads(1)
WIDTH, CLASSES = 32, 4


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.places = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.encoder(x).mean(dim=1)))


model = ViT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _step in range(60):
    target = torch.randint(CLASSES, (16,))
    images = 0.5 * torch.randn(16, 3, 16, 16)
    for image, quadrant in zip(images, target.tolist(), strict=True):
        image[:, 8 * (quadrant // 2) :, 8 * (quadrant % 2) :][:, :8, :8] += 1.0
    loss = F.cross_entropy(model(images), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
