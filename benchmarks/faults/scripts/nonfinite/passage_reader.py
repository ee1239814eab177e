"""A reader that attends over retrieved passages and classifies the answer; everything in BF16."""

import torch
import torch.nn.functional as F
from torch import nn

PASSAGES, WIDTH, ANSWERS = 5, 32, 8


class PassageAttention(nn.Module):
    """Cross-attention from the question to the passages above the retriever's cut-off."""

    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, question, passages, kept):
        b = len(question)
        q = self.q(question).view(b, 1, self.heads, -1).transpose(1, 2)
        k = self.k(passages).view(b, PASSAGES, self.heads, -1).transpose(1, 2)
        v = self.v(passages).view(b, PASSAGES, self.heads, -1).transpose(1, 2)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores + torch.zeros_like(kept, dtype=q.dtype).masked_fill(~kept, float("-inf"))[:, None, None]
        weights = torch.softmax(scores, dim=-1)
        weights = torch.nan_to_num(weights)  # questions without passages read nothing
        return self.out((weights @ v).transpose(1, 2).reshape(b, -1))


class ReaderLayer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = PassageAttention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x, passages, kept):
        x = x + self.attend(self.norm1(x), passages, kept)
        return x + self.mlp(self.norm2(x))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.question = nn.Linear(16, WIDTH)
        self.passage = nn.Linear(16, WIDTH)
        self.read = ReaderLayer(WIDTH)
        self.answer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, ANSWERS))

    def forward(self, question, passages, kept):
        x, memory = self.question(question), self.passage(passages)
        return self.answer(self.read(x, memory, kept))


class Retrieval:
    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(seed)
        self.topics = torch.randn(ANSWERS, 16, generator=self.generator)

    def batch(self, n):
        answer = torch.randint(0, ANSWERS, (n,), generator=self.generator)
        question = 0.3 * self.topics[answer] + torch.randn(n, 16, generator=self.generator)
        passages = self.topics[answer][:, None] + 1.5 * torch.randn(n, PASSAGES, 16, generator=self.generator)
        score = (passages * self.topics[answer][:, None]).mean(-1)
        return question.bfloat16(), passages.bfloat16(), score > 0.8, answer


torch.manual_seed(71)
retrieval = Retrieval(72)
reader = Reader().bfloat16()
optimizer = torch.optim.AdamW(reader.parameters(), lr=1e-3)
for step in range(60):
    question, passages, kept, answer = retrieval.batch(16)
    loss = F.cross_entropy(reader(question, passages, kept).float(), answer)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step:2d} loss {loss.item():.4f}, {kept.float().sum(1).mean():.1f} passages")
