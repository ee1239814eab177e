"""Caption-conditioned latent flow matching; linear layers round their operands to FP8 with a scale per tensor."""

import torch
from torch import nn

E4M3_MAX = 448.0


def to_fp8(x):
    """Round to E4M3 and back; the gradient passes straight through."""
    scale = E4M3_MAX / x.detach().abs().amax()
    rounded = (x.detach() * scale).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float() / scale
    return x + (rounded - x).detach()


class FP8Linear(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(to_fp8(x), to_fp8(self.weight), self.bias)


class Modulated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 3 * width)
        self.up, self.down = FP8Linear(width, 2 * width), FP8Linear(2 * width, width)

    def forward(self, x, cond):
        shift, scale, gate = self.modulation(cond).chunk(3, -1)
        h = self.norm(x) * (1 + scale) + shift
        return x + gate * self.down(nn.functional.silu(self.up(h)))


class CaptionFlow(nn.Module):
    def __init__(self, latent=16, text=24, width=48, depth=2):
        super().__init__()
        self.stem = FP8Linear(latent, width)
        self.caption = FP8Linear(text, width)
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(Modulated(width) for _ in range(depth))
        self.head = nn.Linear(width, latent)

    def forward(self, x, t, caption):
        h, cond = self.stem(x), self.caption(caption) + self.time(t)
        for block in self.blocks:
            h = block(h, cond)
        return self.head(h)


class Pairs:
    """Latents that a caption embedding explains up to noise."""

    def __init__(self, seed, latent=16, text=24):
        self.generator = torch.Generator().manual_seed(seed)
        self.map = torch.randn(text, latent, generator=self.generator) / text**0.5

    def draw(self, n):
        caption = torch.randn(n, len(self.map), generator=self.generator)
        noise = torch.randn(n, self.map.shape[1], generator=self.generator)
        return torch.tanh(caption @ self.map) + 0.1 * noise, caption

    def chance(self):
        return torch.rand(1, generator=self.generator).item()


def run(steps=160, batch=32, unconditional=0.02):
    torch.manual_seed(9)
    pairs, model = Pairs(10), CaptionFlow()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    log = []
    for step in range(steps):
        clean, caption = pairs.draw(batch)
        if pairs.chance() < unconditional:  # for guidance at sampling time
            caption = torch.zeros_like(caption)
        t, noise = torch.rand(batch, 1), torch.randn_like(clean)
        velocity = model(torch.lerp(noise, clean, t), t, caption)
        loss = (velocity - (clean - noise)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append(loss.item())
        if step % 20 == 19:
            print(f"step {step + 1}: loss {sum(log[-20:]) / 20:.4f}")


if __name__ == "__main__":
    run()
