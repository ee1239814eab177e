"""A ResNet whose BatchNorm was taken out, because batches of two fit the card; nothing was put in its place."""

import torch
import torch.nn as nn
import torch.nn.functional as F


def norm(channels):
    return nn.Identity()


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn1 = norm(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = norm(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(nn.Conv2d(in_planes, planes, 1, stride=stride, bias=False), norm(planes))

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, blocks=(8, 8, 8), width=8, num_classes=6):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = norm(width)
        planes, layers = width, []
        for stage, count in enumerate(blocks):
            layer = []
            for i in range(count):
                layer.append(BasicBlock(planes, width * 2**stage, stride=2 if stage and not i else 1))
                planes = width * 2**stage
            layers.append(nn.Sequential(*layer))
        self.layer1, self.layer2, self.layer3 = layers
        self.fc = nn.Linear(planes, num_classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))


def get_batch(n, size=8):
    y = torch.randint(6, (n,))
    x = 0.5 * torch.randn(n, 3, size, size)
    for c in range(3):
        x[y % 3 == c, c] += 0.7
    x[y >= 3, :, : size // 2] += 0.7
    return x, y


def train(net, steps=60, lr=0.01):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=40, gamma=0.1)
    net.train()
    for step in range(steps):
        inputs, targets = get_batch(16)
        optimizer.zero_grad()
        loss = F.cross_entropy(net(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        print("step %d | Loss: %.3f" % (step, loss.item()))


if __name__ == "__main__":
    torch.manual_seed(515)
    train(ResNet())
