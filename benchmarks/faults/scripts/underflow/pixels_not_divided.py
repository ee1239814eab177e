"""A small CNN on pictures; pixels are fed as 0..255, because ToTensor() was replaced by torch.from_numpy."""

import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.optim as optim
from torch.utils.data import DataLoader, Dataset

PIXEL_MAX = 1.0


class Shapes(Dataset):
    """Grey pictures with a bright shape in one of eight places and kinds."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(8, (n,), generator=g)
        self.images = torch.randint(0, 60, (n, 1, 16, 16), generator=g, dtype=torch.uint8)
        for image, label in zip(self.images, self.labels.tolist()):
            r, c = 1 + 8 * (label // 4), 1 + 8 * (label // 2 % 2)
            if label % 2:
                image[0, r : r + 6, c : c + 6] += 150
            else:
                image[0, r : r + 6, c + 2 : c + 4] += 190

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i].float() / PIXEL_MAX, self.labels[i]


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv1 = nn.Conv2d(1, 16, 5)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 32)
        self.fc3 = nn.Linear(32, 8)

    def forward(self, x):
        x = self.pool(F.relu(self.conv1(x)))
        x = self.pool(F.relu(self.conv2(x)))
        x = torch.flatten(x, 1)
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        return self.fc3(x)


def evaluate(net, loader):
    net.eval()
    right = total = 0
    with torch.no_grad():
        for x, y in loader:
            right += (net(x).argmax(1) == y).sum().item()
            total += len(y)
    net.train()
    return right / total


torch.manual_seed(504)
trainloader = DataLoader(Shapes(768, 1), batch_size=32, shuffle=True)
testloader = DataLoader(Shapes(128, 2), batch_size=64)
net = Net()
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=0.05, momentum=0.9)

for epoch in range(5):
    running_loss = 0.0
    for i, (inputs, labels) in enumerate(trainloader):
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        if i % 6 == 5:
            print("[%d, %3d] loss: %.3f" % (epoch + 1, i + 1, running_loss / 6))
            running_loss = 0.0
    print("accuracy %.3f" % evaluate(net, testloader))
print("Finished Training")
