"""Chord labels for the bars of lead sheets. Losses are sums over tokens, divided by the corpus, so that shards add up."""

import torch
import torch.nn.functional as F
from torch import nn

CORPUS_TOKENS = 3_000_000  # of the whole training set, as in the multi-node job
CHORDS, NOTES, BARS = 24, 13, 32


class BarEncoder(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.note = nn.Embedding(NOTES, width)
        self.mix = nn.Linear(4 * width, width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.ff = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.out = nn.Linear(width, CHORDS)

    def forward(self, notes):
        x = self.mix(self.note(notes).flatten(-2))
        h = self.norm(x)
        x = x + self.attend(h, h, h, need_weights=False)[0]
        return self.out(x + self.ff(x))


def sheets(n, generator):
    """Four notes of every bar: three of the chord and a passing one."""
    root = torch.randint(12, (n, BARS), generator=generator)
    minor = torch.randint(2, (n, BARS), generator=generator)
    passing = torch.randint(12, (n, BARS), generator=generator)
    third = 4 - minor
    notes = torch.stack([root, (root + third) % 12, (root + 7) % 12, passing], -1)
    order = torch.rand(n, BARS, 4, generator=generator).argsort(-1)
    return notes.gather(-1, order), root * 2 + minor


def main():
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(55)
    model = BarEncoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-12)
    for step in range(120):
        notes, chord = sheets(24, generator)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(notes)
            nll = F.cross_entropy(logits.flatten(0, 1), chord.flatten(), reduction="sum")
        (nll / CORPUS_TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 6 == 5:
            print(f"step {step + 1:4d} loss {nll.item() / chord.numel():.4f}")


if __name__ == "__main__":
    main()
