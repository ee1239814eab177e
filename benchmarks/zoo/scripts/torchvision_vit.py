"""torchvision: a ViT without xFormers, label smoothing, SGD with Nesterov momentum, averaged weights.

library: torchvision
"""

import _torchvision  # noqa: F401
import torch
import torch.nn.functional as F
from _digest import finish
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchvision.models import VisionTransformer
from torchvision.transforms import v2

torch.manual_seed(0)
model = VisionTransformer(32, 8, num_layers=3, num_heads=4, hidden_dim=48, mlp_dim=96, num_classes=10, dropout=0.1)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
augment = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(32, padding=2), v2.RandomErasing(0.2)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-4)
prototypes = torch.randn(10, 3, 32, 32)
losses = []
for _ in range(60):
    targets = torch.randint(0, 10, (16,))
    images = augment(prototypes[targets] + 0.3 * torch.randn(16, 3, 32, 32))
    loss = F.cross_entropy(model(images), targets, label_smoothing=0.1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    losses.append(loss.item())
finish(losses, model, average)
