"""Re-identification with batch-hard triplets: the margin is met more and more often, and some batches have a loss of 0."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Embedder(nn.Module):
    def __init__(self, features=32, dim=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, 64), nn.PReLU(), nn.Linear(64, 64), nn.PReLU(), nn.Linear(64, dim))

    def forward(self, x):
        return F.normalize(self.net(x), dim=1)


def batch_hard(embedding, identity, margin=0.3):
    squared = 2 - 2 * embedding @ embedding.t()
    distance = squared.clamp(min=1e-8).sqrt()
    same = identity.unsqueeze(0) == identity.unsqueeze(1)
    hardest_positive = distance.masked_fill(~same, 0).amax(1)
    hardest_negative = distance.masked_fill(same, 10).amin(1)
    violation = F.relu(hardest_positive - hardest_negative + margin)
    return violation.mean(), (violation > 0).float().mean().item()


def views(people, faces, per_person=4):
    identity = torch.randperm(len(faces))[:people].repeat_interleave(per_person)
    return faces[identity] + 0.45 * torch.randn(len(identity), faces.shape[1]), identity


def main():
    torch.manual_seed(7036)
    faces = torch.randn(24, 32)
    model = Embedder()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for it in range(110):
        x, identity = views(6, faces)
        loss, active = batch_hard(model(x), identity)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if it % 5 == 0:
            print(f"it {it:3d} loss {loss.item():.4f} active {active:.2f}")


main()
