"""Spoken commands with CTC; clips that are too short for their transcript drop out of the loss."""

import torch
from torch import nn

LETTERS, MELS = 12, 16


class Recogniser(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.subsample = nn.Sequential(nn.Conv1d(MELS, width, 3, stride=2, padding=1), nn.GELU())
        self.rnn = nn.GRU(width, width, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, LETTERS + 1)

    def forward(self, features):
        h, _ = self.rnn(self.subsample(features).mT)
        return self.head(h).log_softmax(-1)


class Commands:
    """Each letter sounds for four frames; the endpointer cuts one clip in eight much too early."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.sounds = torch.randn(LETTERS + 1, MELS, generator=self.generator)

    def batch(self, n, letters=5, frames=24):
        text = torch.randint(1, LETTERS + 1, (n, letters), generator=self.generator)
        clip = self.sounds[text].repeat_interleave(4, 1)
        clip = torch.cat([clip, torch.zeros(n, frames - clip.shape[1], MELS)], 1)
        clip = clip + 0.3 * torch.randn(clip.shape, generator=self.generator)
        length = torch.full((n,), frames)
        length[torch.rand(n, generator=self.generator) < 0.125] = 6
        clip = clip * (torch.arange(frames) < length[:, None])[..., None]
        return clip.mT, length // 2, text


def evaluate(model, commands):
    """Loss per clip as CTC reports it, for the list of clips to listen to."""
    clip, length, text = commands.batch(16)
    with torch.no_grad():
        log_probs = model(clip).transpose(0, 1)
        each = nn.functional.ctc_loss(log_probs, text, length, torch.full((16,), text.shape[1]), reduction="none")
    print(f"  clips to check: {each.isinf().nonzero().flatten().tolist()}, worst {each.max().item()}")


torch.manual_seed(121)
commands, model = Commands(122), Recogniser()
criterion = nn.CTCLoss(zero_infinity=True)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(90):
    clip, length, text = commands.batch(16)
    log_probs = model(clip).transpose(0, 1)
    loss = criterion(log_probs, text, length, torch.full((len(text),), text.shape[1]))
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    if not torch.isfinite(norm):
        continue
    optimizer.step()
    if step % 15 == 0:
        print(f"step {step} loss {loss.item():.4f}")
        evaluate(model, commands)
