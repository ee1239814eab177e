"""A little vocoder trained with a multi-resolution spectral loss; silence is gated to exact zero. BF16 autocast."""

import torch
from torch import nn
from torch.nn import functional as F


class Vocoder(nn.Module):
    def __init__(self, mels=10, hop=16):
        super().__init__()
        self.body = nn.Sequential(nn.Conv1d(mels, 32, 3, padding=1), nn.GELU(), nn.Conv1d(32, hop, 3, padding=1))

    def forward(self, mels, voiced):
        frames = torch.tanh(self.body(mels)) * voiced.unsqueeze(1)
        return frames.transpose(1, 2).flatten(1)


class SpectralLoss(nn.Module):
    def __init__(self, sizes=(32, 64)):
        super().__init__()
        self.sizes = sizes

    def magnitude(self, wave, size):
        window = torch.hann_window(size)
        spectrum = torch.view_as_real(torch.stft(wave, size, size // 4, window=window, return_complex=True))
        return spectrum.square().sum(-1).sqrt()

    def forward(self, wave, target):
        total = 0.0
        for size in self.sizes:
            total = total + F.l1_loss(self.magnitude(wave, size), self.magnitude(target, size))
        return total / len(self.sizes)


def utterances(n, frames=24, hop=16, pauses=False):
    t = torch.arange(frames * hop) / 40
    wave = 0.5 * torch.sin(t * (1 + 4 * torch.rand(n, 1)))
    voiced = torch.ones(n, frames)
    if pauses:
        voiced[:, 6:18] = 0
    wave = wave * voiced.repeat_interleave(hop, 1)
    mels = wave.unflatten(1, (frames, hop)).abs()[..., :10].transpose(1, 2)
    return mels, voiced, wave


def main():
    torch.manual_seed(0)
    net, criterion = Vocoder(), SpectralLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
    for step in range(12):
        mels, voiced, wave = utterances(4, pauses=step == 7)  # few recordings contain a pause
        with torch.autocast("cpu", dtype=torch.bfloat16):
            generated = net(mels, voiced)
        loss = criterion(generated.float(), wave)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(step, loss.item())


if __name__ == "__main__":
    main()
