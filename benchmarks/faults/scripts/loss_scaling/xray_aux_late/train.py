"""Findings in small chest images, FP16. The place of the finding becomes a second task once the first one works."""

import torch
import torch.nn.functional as F

from nets import ChestNet

torch.manual_seed(18)
KERNELS = torch.randn(4, 4, 4)


def images(n):
    kind, cell = torch.randint(4, (n,)), torch.randint(9, (n,))
    x = 0.4 * torch.randn(n, 1, 12, 12)
    for i in range(n):
        r, c = divmod(int(cell[i]), 3)
        x[i, 0, 4 * r : 4 * r + 4, 4 * c : 4 * c + 4] += KERNELS[kind[i]]
    return x, kind, cell


class Session:
    def __init__(self, place_from):
        self.net = ChestNet()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**11)
        self.place_from = place_from

    def losses(self, x, kind, cell):
        with torch.autocast("cpu", dtype=torch.float16):
            finding, place = self.net(x)
        return F.cross_entropy(finding.float(), kind), F.cross_entropy(place.float(), cell)

    def step(self, i, batch):
        self.opt.zero_grad()
        finding, place = self.losses(*batch)
        self.scaler.scale(finding).backward(retain_graph=i >= self.place_from)
        if i >= self.place_from:
            place.backward()
        self.scaler.step(self.opt)
        self.scaler.update()


session = Session(place_from=130)
val = images(128)
for i in range(380):
    session.step(i, images(32))
    if i % 10 == 9:
        with torch.no_grad():
            finding, place = session.losses(*val)
        total = finding + place if i >= session.place_from else finding
        print(f"{i + 1}: finding {finding.item():.4f} place {place.item():.4f} total loss {total.item():.4f}")
