"""News recommendation from what a user has clicked, with nn.MultiheadAttention over the history."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

MAX_HISTORY = 10
N_NEWS = 200


class ClickDataset(Dataset):
    def __init__(self, n_users, rng):
        topics = rng.integers(0, 8, N_NEWS + 1)
        self.samples = []
        for user in range(n_users):
            taste = rng.integers(0, 8)
            liked = np.flatnonzero(topics[1:] == taste) + 1
            length = rng.integers(1, MAX_HISTORY + 1) if rng.random() > 0.008 else 0  # some have only just signed up
            history = np.zeros(MAX_HISTORY, dtype=np.int64)
            history[:length] = rng.choice(liked, length)
            candidates = rng.integers(1, N_NEWS + 1, 5)
            label = rng.integers(0, 5)
            candidates[label] = rng.choice(liked)
            self.samples.append((history, candidates, label))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, idx):
        history, candidates, label = self.samples[idx]
        return torch.from_numpy(history), torch.from_numpy(candidates), int(label)


class UserEncoder(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, clicked, pad_mask):
        out, _ = self.attn(clicked, clicked, clicked, key_padding_mask=pad_mask)
        out = self.norm(clicked + out)
        keep = (~pad_mask).unsqueeze(-1).float()
        return (out * keep).sum(1) / keep.sum(1).clamp(min=1)


class NRMS(nn.Module):
    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.news_embedding = nn.Embedding(N_NEWS + 1, dim, padding_idx=0)
        self.news_encoder = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(0.1), nn.Linear(dim, dim))
        self.user_encoder = UserEncoder(dim, heads)

    def forward(self, history, candidates):
        clicked = self.news_encoder(self.news_embedding(history))
        user = self.user_encoder(clicked, history == 0)
        news = self.news_encoder(self.news_embedding(candidates))
        return torch.bmm(news, user.unsqueeze(2)).squeeze(2)


def train_one_epoch(model, loader, optimizer, scheduler):
    model.train()
    total, correct = 0.0, 0
    for history, candidates, label in loader:
        scores = model(history, candidates)
        loss = F.cross_entropy(scores, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        total += loss.item()
        correct += (scores.argmax(1) == label).sum().item()
    return total / len(loader), correct / len(loader.dataset)


if __name__ == "__main__":
    torch.manual_seed(2)
    rng = np.random.default_rng(12)
    data = ClickDataset(640, rng)
    loader = DataLoader(data, batch_size=32, shuffle=True)
    model = NRMS()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5)
    for epoch in range(3):
        loss, acc = train_one_epoch(model, loader, optimizer, scheduler)
        print(f"epoch {epoch}: loss {loss:.4f} acc {acc:.3f}")
