"""vector-quantize-pytorch: a VQ autoencoder with EMA codes and a commitment loss.

library: vector-quantize-pytorch
"""

import torch
import torch.nn.functional as F
from _digest import finish
from torch import nn
from vector_quantize_pytorch import VectorQuantize

torch.manual_seed(0)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, 16, 4, stride=2, padding=1), nn.GELU(), nn.Conv2d(16, 16, 3, padding=1)
        )
        self.codes = VectorQuantize(dim=16, codebook_size=32, accept_image_fmap=True, kmeans_init=True, decay=0.9)
        self.decode = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.GELU(), nn.ConvTranspose2d(16, 1, 4, 2, 1))

    def forward(self, x):
        quantized, _, commitment = self.codes(self.encode(x))
        return self.decode(quantized), commitment


model = Autoencoder()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(60):
    phase = torch.rand(8, 1, 1, 1) * 6
    image = torch.sin(torch.arange(16.0) / 2 + phase) * torch.cos(torch.arange(16.0)[:, None] / 3)
    restored, commitment = model(image)
    loss = F.l1_loss(restored, image) + commitment.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
