"""VQ-VAE for short melodies; model.to(bfloat16) also takes the codebook's running sums along."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(72)
DTYPE = torch.bfloat16


class VectorQuantizerEMA(nn.Module):
    def __init__(self, codes=32, dim=8, decay=0.995, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        embed = torch.randn(codes, dim)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.ones(codes))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        index = torch.cdist(flat.float(), self.embed.float()).argmin(-1)
        quantized = self.embed[index].view_as(z)
        if self.training:
            with torch.no_grad():
                onehot = F.one_hot(index, len(self.embed)).to(flat.dtype)
                self.cluster_size.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
                self.embed_avg.mul_(self.decay).add_(onehot.t() @ flat, alpha=1 - self.decay)
                self.embed.copy_(self.embed_avg / (self.cluster_size + self.eps).unsqueeze(1))
        commitment = F.mse_loss(z.float(), quantized.detach().float())
        return z + (quantized - z).detach(), commitment


class VQVAE(nn.Module):
    def __init__(self, notes=16, width=48, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(notes, width), nn.GELU(), nn.Linear(width, 2 * dim))
        self.vq = VectorQuantizerEMA(dim=dim)
        self.decoder = nn.Sequential(nn.Linear(2 * dim, width), nn.GELU(), nn.Linear(width, notes))

    def forward(self, x):
        z, commitment = self.vq(self.encoder(x).view(len(x), 2, -1))
        return self.decoder(z.flatten(1)), commitment


motifs = torch.randn(40, 16)


def melodies(n):
    return (motifs[torch.randint(40, (n,))] + 0.1 * torch.randn(n, 16)).to(DTYPE)


model = VQVAE().to(DTYPE)
start = model.vq.embed.clone()
masters = [p.detach().float().requires_grad_() for p in model.parameters()]
optimizer = torch.optim.Adam(masters, lr=2e-3)
for step in range(400):
    x = melodies(64)
    recon, commitment = model(x)
    loss = F.mse_loss(recon.float(), x.float())
    model.zero_grad()
    (loss + 0.25 * commitment).backward()
    for master, p in zip(masters, model.parameters()):
        master.grad = p.grad.to(master.dtype)
    optimizer.step()
    with torch.no_grad():
        for master, p in zip(masters, model.parameters()):
            p.copy_(master)
    if step % 20 == 19:
        print(f"step {step + 1} recon loss {loss.item():.4f} commitment {commitment.item():.4f}")
