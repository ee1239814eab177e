# bird calls: log power spectrogram front end + small CNN, fp16 autocast for the front end and the net
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(90)
SR, N = 2000, 1024
SPECIES = 4


def calls(n):
    y = torch.randint(SPECIES, (n,))
    t = torch.arange(N) / SR
    f = 150 + 120 * y.float().unsqueeze(1) + 20 * torch.randn(n, 1)
    x = torch.sin(6.2832 * f * t + 3 * torch.sin(6.2832 * 6 * t))
    gain = torch.exp(0.7 * torch.randn(n, 1))
    return gain * (x + 0.2 * torch.randn(n, N)), y


class FilterBank(nn.Module):
    """DFT as a matrix product, so that it can be exported."""

    def __init__(self, size=128, hop=64):
        super().__init__()
        self.size, self.hop = size, hop
        k = torch.arange(size // 2 + 1).unsqueeze(1) * torch.arange(size) * (6.283185307 / size)
        self.register_buffer("cos", (k.cos() * torch.hann_window(size)).T.contiguous())
        self.register_buffer("sin", (k.sin() * torch.hann_window(size)).T.contiguous())

    def forward(self, wave):
        frames = wave.unfold(-1, self.size, self.hop)
        re, im = frames @ self.cos, frames @ self.sin
        power = re * re + im * im
        return (power + 1e-4).log10()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.bank = FilterBank()
        self.conv1 = nn.Conv2d(1, 8, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.fc = nn.Linear(16, SPECIES)

    def forward(self, wave):
        s = self.bank(wave).unsqueeze(1)
        h = F.relu(self.conv1(s))
        h = F.relu(self.conv2(h))
        return self.fc(h.mean((2, 3)))


net = Net()
opt = torch.optim.AdamW(net.parameters(), lr=4e-3)
for step in range(90):
    x, y = calls(24)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        print(f"step={step} loss={loss.item():.4f}")
