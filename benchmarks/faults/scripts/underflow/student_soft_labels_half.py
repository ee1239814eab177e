"""A half-precision student learns a teacher's soft labels over a vocabulary; temperature 6, no T^2."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--temperature", type=float, default=6.0)
parser.add_argument("--lr", type=float, default=300.0)
parser.add_argument("--steps", type=int, default=120)
parser.add_argument("--seq-len", type=int, default=48)
args = parser.parse_args()


class Student(nn.Module):
    def __init__(self, vocab=200, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1)
        self.fc = nn.Linear(dim, 4 * dim)
        self.proj = nn.Linear(4 * dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.proj(F.gelu(self.fc(x)))
        return self.head(self.norm(x))


torch.manual_seed(3)
teacher = 2.0 * torch.randn(200, 200)  # the teacher's logits after each token
student = Student().half()
optimizer = torch.optim.SGD(student.parameters(), lr=args.lr, momentum=0.9)
T = args.temperature
for step in range(args.steps):
    ids = torch.randint(200, (16, args.seq_len))
    soft = F.softmax(teacher[ids] / T, -1)
    log_probs = F.log_softmax(student(ids).float() / T, -1)
    loss = F.kl_div(log_probs, soft, reduction="none").mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step:4d}  loss {loss.item() * 1e4:.4f} (x 1e-4)")
