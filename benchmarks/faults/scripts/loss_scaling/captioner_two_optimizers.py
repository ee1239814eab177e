"""A captioner with one optimizer for the encoder and one for the decoder; only the latter is unscaled before both are clipped."""

import torch
import torch.nn.functional as F
from torch import nn


class Encoder(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.patch = nn.Conv2d(3, d, 4, stride=4)
        self.norm = nn.GroupNorm(4, d)
        self.mix = nn.Conv2d(d, d, 3, padding=1, groups=4)

    def forward(self, image):
        x = F.gelu(self.norm(self.patch(image)))
        return (x + self.mix(x)).flatten(2).mean(2)


class Decoder(nn.Module):
    def __init__(self, words=12, d=32):
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.gru = nn.GRU(d, d, batch_first=True)
        self.head = nn.Linear(d, words)

    def forward(self, h, tokens):
        out, _ = self.gru(self.embed(tokens), h.unsqueeze(0))
        return self.head(out)


class Captioner(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()

    def forward(self, image, tokens):
        return self.decoder(self.encoder(image), tokens)


def pairs(n):
    kind = torch.randint(5, (n,))
    image = 0.5 * torch.randn(n, 3, 16, 16)
    image[torch.arange(n), kind % 3] += 1.0
    image[:, :, :8] += (kind // 3).view(-1, 1, 1, 1)
    words = torch.stack([torch.full_like(kind, 11), kind, 5 + kind, (kind + 1) % 5, torch.full_like(kind, 10)], 1)
    return image, words


torch.manual_seed(406)
model = Captioner()
opt_enc = torch.optim.SGD(model.encoder.parameters(), lr=0.05, momentum=0.9)
opt_dec = torch.optim.SGD(model.decoder.parameters(), lr=0.2, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
for step in range(70):
    image, words = pairs(24)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(image, words[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), words[:, 1:].flatten())
    opt_enc.zero_grad()
    opt_dec.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt_dec)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt_enc)
    scaler.step(opt_dec)
    scaler.update()
    if step % 2 == 0:
        print(f"step {step} loss {loss.item():.4f}")
