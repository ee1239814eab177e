"""A VQ image tokenizer in BF16: the codebook is an exponential moving average of what falls on each code."""

import torch
import torch.nn.functional as F
from torch import nn


class EMAQuantizer(nn.Module):
    def __init__(self, codes=32, dim=8, decay=0.99, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        embed = torch.randn(codes, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        distance = (flat[:, None] - self.embed[None]).pow(2).sum(-1)
        index = distance.argmin(1)
        if self.training:
            onehot = F.one_hot(index, len(self.embed)).to(flat.dtype)
            self.cluster_size.lerp_(onehot.sum(0), 1 - self.decay)
            self.embed_avg.lerp_((onehot.t() @ flat).detach(), 1 - self.decay)
            self.embed.copy_(self.embed_avg / (self.cluster_size + self.eps)[:, None])
        quantized = self.embed[index].view_as(z)
        commit = F.mse_loss(z.float(), quantized.detach().float())
        return z + (quantized - z).detach(), commit


class Tokenizer(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 48), nn.SiLU(), nn.Linear(48, dim))
        self.quantizer = EMAQuantizer(dim=dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 48), nn.SiLU(), nn.Linear(48, 16))

    def forward(self, x):
        z, commit = self.quantizer(self.encoder(x))
        return self.decoder(z), commit


def patches(n, centres):
    return centres[torch.randint(len(centres), (n,))] + 0.1 * torch.randn(n, 16)


torch.manual_seed(9)
centres = torch.randn(24, 16)
model = Tokenizer()
model.quantizer.to(torch.bfloat16)
optimizer = torch.optim.AdamW([*model.encoder.parameters(), *model.decoder.parameters()], lr=1e-3)
for step in range(400):
    x = patches(64, centres)
    z, commit = model.quantizer(model.encoder(x).to(torch.bfloat16))
    recon = model.decoder(z.float())
    loss = F.mse_loss(recon, x) + 0.25 * commit
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"{step:4d} loss {loss.item():.4f}")
