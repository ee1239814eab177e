import torch
import torch.nn as nn
import torch.nn.functional as F


class Stereo(nn.Module):
    """Disparity from two grey pictures side by side."""

    def __init__(self, ch=12):
        super().__init__()
        self.enc1 = nn.Conv2d(2, ch, 5, padding=2)
        self.enc2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.enc3 = nn.Conv2d(ch, ch, 3, padding=1)
        self.disp = nn.Conv2d(ch, 1, 1)

    def forward(self, pair):
        x = F.relu(self.enc1(pair))
        x = x + F.relu(self.enc2(x))
        x = x + F.relu(self.enc3(x))
        return self.disp(x)[:, 0]


def scenes(n, h=32, w=40):
    left = F.avg_pool2d(torch.randn(n, 1, h + 4, w + 4), 5, stride=1) * 5
    shift = torch.randint(0, 4, (n,))
    right = torch.stack([torch.roll(p, int(s), -1) for p, s in zip(left, shift)])
    return torch.cat([left, right], 1), shift[:, None, None].float().expand(n, h, w) / 4


class Trainer:
    def __init__(self, model, lr=2e-3, smooth=0.1):
        self.model = model.half()
        self.master = [p.detach().float().clone().requires_grad_() for p in self.model.parameters()]
        self.optimizer = torch.optim.Adam(self.master, lr=lr)
        self.smooth = smooth

    def loss(self, predicted, disparity):
        per_pixel = F.smooth_l1_loss(predicted.float(), disparity, beta=1.0)
        return self.smooth * per_pixel / 10

    def step(self, pair, disparity):
        loss = self.loss(self.model(pair.half()), disparity)
        self.model.zero_grad()
        loss.backward()
        for m, p in zip(self.master, self.model.parameters()):
            m.grad = p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.model.parameters()):
                p.copy_(m)
        return loss.item() * 100


torch.manual_seed(66)
trainer = Trainer(Stereo())
for it in range(60):
    loss = trainer.step(*scenes(8))
    if it % 3 == 0:
        print(f"it {it:3d} loss {loss:.4f}")
