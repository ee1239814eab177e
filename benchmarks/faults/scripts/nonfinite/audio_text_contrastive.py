"""Contrastive audio-text pretraining on 16-bit PCM, FP16 autocast. A symmetric InfoNCE with learned temperature."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F


class AudioTower(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.frontend = nn.Conv1d(1, 32, kernel_size=64, stride=32, bias=False)
        nn.init.kaiming_normal_(self.frontend.weight)
        self.norm = nn.GroupNorm(4, 32)
        self.encoder = nn.Sequential(
            nn.Conv1d(32, 48, 5, 2, 2), nn.GELU(), nn.Conv1d(48, 48, 5, 2, 2), nn.GELU(), nn.AdaptiveAvgPool1d(1)
        )
        self.proj = nn.Linear(48, dim)

    def forward(self, pcm):
        h = self.norm(self.frontend(pcm.unsqueeze(1)))
        return self.proj(self.encoder(h).squeeze(-1))


class TextTower(nn.Module):
    def __init__(self, dim, vocabulary=40):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, 48)
        self.proj = nn.Linear(48, dim)

    def forward(self, tokens):
        return self.proj(self.bag(tokens))


class CLAP(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.audio, self.text = AudioTower(dim), TextTower(dim)
        self.log_temperature = nn.Parameter(torch.tensor(float(np.log(1 / 0.07))))

    def forward(self, pcm, tokens):
        a = F.normalize(self.audio(pcm).float(), dim=-1)
        t = F.normalize(self.text(tokens).float(), dim=-1)
        return self.log_temperature.exp().clamp(max=100) * a @ t.T


def read_clips(rng, count, loudness):
    """Sixteen-bit samples of two partials, as a WAV reader returns them."""
    time = np.arange(2048) / 16000
    pitch = rng.integers(0, 20, count)
    tone = np.sin(2 * np.pi * (200 + 150 * pitch[:, None]) * time) + 0.2 * rng.standard_normal((count, 2048))
    pcm = np.clip(tone * loudness, -32768, 32767).astype(np.int16)
    return torch.from_numpy(pcm), torch.from_numpy(np.stack([pitch, 20 + pitch], 1))


def main():
    torch.manual_seed(0)
    rng = np.random.default_rng(8)
    model = CLAP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    for step in range(26):
        # one source in the mixture was mastered much hotter than the others
        pcm, tokens = read_clips(rng, 16, loudness=24_000 if step >= 9 else 2_500)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(pcm.float(), tokens)
            labels = torch.arange(len(pcm))
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.3f} scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    main()
