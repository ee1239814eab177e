"""Distilling a text CNN into a bag of embeddings; the temperature of the teacher's targets is lowered in stages."""

import torch
import torch.nn.functional as F
from torch import nn, optim


class TeacherCNN(nn.Module):
    def __init__(self, vocab=120, dim=32, classes=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.conv = nn.Conv1d(dim, 64, 3, padding=1)
        self.fc = nn.Linear(64, classes)

    def forward(self, ids):
        h = F.relu(self.conv(self.emb(ids).mT))
        return self.fc(h.amax(-1))


class Student(nn.Module):
    def __init__(self, vocab=120, dim=16, classes=6):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, classes))

    def forward(self, ids):
        return self.mlp(self.bag(ids))


def sentences(n):
    y = torch.randint(6, (n,))
    ids = torch.randint(120, (n, 14))
    ids[:, ::3] = (y * 20)[:, None] + torch.randint(20, (n, 5))
    return ids, y


@torch.no_grad()
def soft_targets(teacher, ids, temperature):
    logits = teacher(ids)
    probs = F.softmax(logits / temperature, dim=-1)
    entropy = (probs * probs.log()).sum(-1, keepdim=True)
    return probs, entropy


torch.manual_seed(8)
teacher, student = TeacherCNN(), Student()
opt_t = optim.Adam(teacher.parameters(), lr=4e-3)
for _ in range(60):
    ids, y = sentences(32)
    F.cross_entropy(teacher(ids), y).backward()
    opt_t.step()
    opt_t.zero_grad()
teacher.eval()

opt = optim.SGD(student.parameters(), lr=0.5, momentum=0.9)
for step in range(28):
    temperature = 4.0 if step < 8 else 1.0 if step < 17 else 0.04
    ids, y = sentences(32)
    probs, entropy = soft_targets(teacher, ids, temperature)
    log_q = F.log_softmax(student(ids), dim=-1)
    kl = entropy.squeeze(-1) - (probs * log_q).sum(-1)
    loss = kl.mean() + 0.1 * F.nll_loss(log_q, y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        print(f"step {step:2d} T={temperature} loss {loss.item():.3f}")
