"""Deep Sets on particle jets of very different multiplicity: energies are summed, not averaged. FP16 autocast."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence


class DeepSets(nn.Module):
    def __init__(self, features=4, latent=32):
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(features, 64), nn.ReLU(), nn.Linear(64, latent), nn.ReLU())
        self.norm = nn.LayerNorm(latent)
        self.rho = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(), nn.Linear(64, 2))

    def forward(self, particles, lengths):
        keep = torch.arange(particles.shape[1])[None, :] < lengths[:, None]
        h = self.phi(particles) * keep.unsqueeze(-1)
        pooled = h.sum(dim=1)
        return self.rho(self.norm(pooled))


def jets(batch, multiplicity, generator):
    """Four-momenta in GeV."""
    label = torch.randint(2, (batch,), generator=generator)
    sizes = (multiplicity * (0.5 + torch.rand(batch, generator=generator))).long() + 1
    sets = []
    for n, y in zip(sizes.tolist(), label.tolist()):
        energy = 40 * torch.rand(n, 1, generator=generator) ** (1 + y)
        direction = nn.functional.normalize(torch.randn(n, 3, generator=generator), dim=-1)
        sets.append(torch.cat([energy, energy * direction], -1))
    return pad_sequence(sets, batch_first=True), sizes, label


def main():
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(42)
    model = DeepSets()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1000)
    for step in range(28):
        # after the soft jets come the hard ones, with up to thousands of constituents
        x, n, y = jets(8, 60 if step < 11 else 9000, generator)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(model(x, n), y)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 4 == 0:
            print(f"[{step:02d}] loss {float(loss.detach()):.4f}  scale {scaler.get_scale():.1f}")


main()
