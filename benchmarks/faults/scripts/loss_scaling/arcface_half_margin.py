"""Face embeddings with an ArcFace head in FP16: a cosine that rounds to 1 has a sine whose gradient is infinite."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class ArcMarginProduct(nn.Module):
    def __init__(self, in_features, out_features, s=5.0, m=0.4):
        super().__init__()
        self.s, self.m = s, m
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        nn.init.xavier_uniform_(self.weight)
        self.cos_m, self.sin_m = math.cos(m), math.sin(m)
        self.th = math.cos(math.pi - m)
        self.mm = math.sin(math.pi - m) * m

    def forward(self, features, label):
        cosine = F.linear(F.normalize(features), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - cosine * cosine).clamp(0, 1))
        phi = cosine * self.cos_m - sine * self.sin_m
        phi = torch.where(cosine > self.th, phi, cosine - self.mm)
        one_hot = F.one_hot(label, cosine.shape[1])
        return self.s * torch.where(one_hot.bool(), phi, cosine)


class Backbone(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, stride=2, padding=1)
        self.bn1 = nn.BatchNorm2d(12)
        self.prelu = nn.PReLU(12)
        self.conv2 = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(24)
        self.fc = nn.Linear(24 * 9, dim)

    def forward(self, x):
        x = self.prelu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        return self.fc(x.flatten(1))


class Faces:
    """Most of the people were photographed in a studio, the others anywhere."""

    def __init__(self, people=16):
        self.prints = torch.randn(people, 1, 12, 12)
        self.noise = torch.where(torch.arange(people) % 4 != 0, 0.005, 2.0).view(-1, 1, 1, 1)

    def batch(self, n):
        label = torch.randint(len(self.prints), (n,))
        return self.prints[label] + self.noise[label] * torch.randn(n, 1, 12, 12), label


def main():
    torch.manual_seed(506)
    faces = Faces()
    backbone, head = Backbone(), ArcMarginProduct(12, 16)
    params = [*backbone.parameters(), *head.parameters()]
    opt = torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=5e-4)
    amp = torch.amp.GradScaler("cpu", growth_interval=100)
    for global_step in range(200):
        img, label = faces.batch(96)
        with torch.autocast("cpu", dtype=torch.float16):
            logits = head(backbone(img), label)
        loss = F.cross_entropy(logits.float(), label)
        amp.scale(loss).backward()
        amp.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(params, 5)
        amp.step(opt)
        amp.update()
        opt.zero_grad()
        if global_step % 5 == 0:
            print(
                f"Training: Loss {loss.item():.4f}   Global Step: {global_step}   Fp16 Grad Scale: {amp.get_scale():g}"
            )


main()
