"""pytorch-metric-learning: triplets by a miner, two optimizers with ArcFace beside them.

library: pytorch-metric-learning
"""

import torch
from _digest import finish
from pytorch_metric_learning import losses as objectives
from pytorch_metric_learning import miners
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
miner = miners.MultiSimilarityMiner()
triplet = objectives.TripletMarginLoss(margin=0.2)
arc = objectives.ArcFaceLoss(num_classes=8, embedding_size=16)
optimizers = [torch.optim.Adam(model.parameters(), lr=1e-3), torch.optim.SGD(arc.parameters(), lr=0.05)]
prototypes = torch.randn(8, 32)
losses = []
for _ in range(60):
    labels = torch.randint(0, 8, (32,))
    embedded = model(prototypes[labels] + torch.randn(32, 32))
    loss = triplet(embedded, labels, miner(embedded, labels)) + 0.1 * arc(embedded, labels)
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    losses.append(loss.item())
finish(losses, model, arc)
