# masked prediction of skeleton poses in latent space; the teacher follows slowly, with a rising decay
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

torch.manual_seed(210)
JOINTS, T, D = 8, 12, 32
basis = torch.randn(4, JOINTS * 2)


def poses(n):
    t = torch.arange(T).float().view(1, T, 1)
    phase, speed = 6.28 * torch.rand(n, 1, 4), 0.2 + 0.4 * torch.rand(n, 1, 4)
    return torch.sin(phase + speed * t) @ basis + 0.05 * torch.randn(n, T, JOINTS * 2)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.pos = nn.Linear(JOINTS * 2, D), nn.Parameter(0.2 * torch.randn(T, D))
        layer = nn.TransformerEncoderLayer(D, 4, 64, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(D), enable_nested_tensor=False)

    def forward(self, x, mask=None):
        h = self.lift(x)
        if mask is not None:
            h = h.masked_fill(mask[..., None], 0.0)
        return self.layers(h + self.pos)


class Predictor(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(D, 64), nn.GELU(), nn.Linear(64, D))


student, predictor = Encoder(), Predictor()
teacher = copy.deepcopy(student).requires_grad_(False)
STEPS = 140
opt = torch.optim.AdamW([*student.parameters(), *predictor.parameters()], lr=1e-3, weight_decay=0.05)
for step in range(STEPS):
    x = poses(32)
    mask = torch.rand(32, T) < 0.4
    with torch.no_grad():
        goal = F.layer_norm(teacher(x), (D,))
    loss = F.smooth_l1_loss(predictor(student(x, mask))[mask], goal[mask])
    opt.zero_grad()
    loss.backward()
    opt.step()
    decay = 0.998 + 0.002 * step / STEPS
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 1 - decay)
    if step % 3 == 0:
        print(f"step {step} loss {loss.item():.4f}")
