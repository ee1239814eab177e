"""Re-identifies whales by their flukes: an embedding trained with batch-hard triplets in Lightning."""

import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, Sampler

warnings.filterwarnings("ignore")
torch.manual_seed(21)
WHALES, SHOTS = 40, 16


class Flukes(Dataset):
    """Outline descriptors of flukes, a few photographs of each animal."""

    def __init__(self):
        shape = torch.randn(WHALES, 1, 64).cumsum(-1) / 8
        self.x = shape.expand(-1, SHOTS, -1) + 0.35 * torch.randn(WHALES, SHOTS, 64)
        self.x = self.x.reshape(-1, 64)
        self.y = torch.arange(WHALES).repeat_interleave(SHOTS)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class PerWhale(Sampler):
    """Eight animals, four photographs each."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            whales = torch.randperm(WHALES)[:8].tolist()
            yield [w * SHOTS + int(s) for w in whales for s in torch.randperm(SHOTS)[:4]]


class Embedder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 16, 5, stride=2, padding=2), nn.ReLU(), nn.Conv1d(16, 32, 5, stride=2, padding=2), nn.ReLU()
        )
        self.project = nn.Linear(32 * 16, dim)

    def forward(self, x):
        return F.normalize(self.project(self.conv(x[:, None]).flatten(1)), dim=-1)


class FlukeModel(L.LightningModule):
    def __init__(self, margin=0.3):
        super().__init__()
        self.embed = Embedder()
        self.margin = margin

    def distances(self, z):
        squares = z.square().sum(-1)
        d2 = squares[:, None] + squares[None, :] - 2 * z @ z.T
        return d2.clamp(min=0).sqrt()

    def training_step(self, batch, index):
        x, y = batch
        d = self.distances(self.embed(x))
        same = y[:, None] == y[None, :]
        hardest_positive = (d * same).amax(1)
        hardest_negative = (d + 10 * same).amin(1)
        loss = F.relu(hardest_positive - hardest_negative + self.margin).mean()
        if self.global_step % 15 == 0:
            print(f"step {self.global_step} loss {loss.item():.4f}")
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=1e-4)


loader = DataLoader(Flukes(), batch_sampler=PerWhale(150))
trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    use_distributed_sampler=False,
)
trainer.fit(FlukeModel(), loader)
