# a small student learns mushroom families from a large, over-confident teacher (temperature 20)
import torch
from torch import nn
import torch.nn.functional as F


def net(width, depth):
    layers = [nn.Linear(16, width), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, 9))


def specimens(centres, n):
    y = torch.randint(9, (n,))
    return centres[y] + 0.6 * torch.randn(n, 16), y


def teach(teacher, centres):
    opt = torch.optim.Adam(teacher.parameters(), lr=3e-3)
    for _ in range(80):
        x, y = specimens(centres, 128)
        opt.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        opt.step()
    with torch.no_grad():
        teacher[-1].weight *= 6
        teacher[-1].bias *= 6
    return teacher.requires_grad_(False).eval()


def main(temperature=20.0):
    torch.manual_seed(30)
    centres = torch.randn(9, 16)
    teacher, student = teach(net(128, 2), centres), net(32, 4)
    opt = torch.optim.AdamW(student.parameters(), lr=2e-3)
    for step in range(200):
        x, _ = specimens(centres, 64)
        target = F.log_softmax(teacher(x) / temperature, -1)
        guess = F.log_softmax(student(x) / temperature, -1)
        loss = F.kl_div(guess, target, log_target=True, reduction="batchmean") * temperature**2
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            print(f"step {step:3d} loss {loss.item():.3f}")


main()
