"""Predicts what an insurance claim will cost from its events, with -inf masks and torchmetrics, in Lightning."""

import math
import warnings

import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.regression import R2Score

warnings.filterwarnings("ignore")
torch.manual_seed(38)
EVENTS, LONGEST = 20, 16


def claims(n):
    """Event codes in order, padded with zero; each event costs, more so after a lawyer's letter (code 1)."""
    length = torch.randint(2, LONGEST + 1, (n,))
    code = torch.randint(1, EVENTS, (n, LONGEST)) * (torch.arange(LONGEST) < length[:, None])
    lawyer = (code == 1).cumsum(1) > 0
    cost = (code.float() / EVENTS) * (1 + 1.5 * lawyer)
    return TensorDataset(code, cost.sum(1) / 4 + 0.05 * torch.randn(n))


class CausalBlock(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Dropout(0.05), nn.Linear(2 * dim, dim))
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.mlp[-1].weight)

    def forward(self, x, hidden):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(hidden[:, None], -math.inf)
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ClaimNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.event = nn.Embedding(EVENTS, dim, padding_idx=0)
        self.blocks = nn.ModuleList(CausalBlock(dim) for _ in range(2))
        self.head = nn.Linear(dim, 1)

    def forward(self, code):
        x = self.event(code)
        causal = torch.ones(LONGEST, LONGEST, dtype=torch.bool).triu(1)
        hidden = causal | (code == 0)[:, None, :]
        for block in self.blocks:
            x = block(x, hidden)
        seen = (code != 0).float()[..., None]
        return (self.head(x) * seen).sum((1, 2)) / 4


class ClaimCost(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = ClaimNet()
        self.mean_loss, self.r2 = MeanMetric(), R2Score()

    def training_step(self, batch, index):
        code, cost = batch
        predicted = self.net(code).float()
        loss = F.mse_loss(predicted, cost)
        self.mean_loss.update(loss.detach())
        self.r2.update(predicted.detach(), cost)
        return loss

    def on_train_epoch_end(self):
        print(f"epoch {self.current_epoch} loss {self.mean_loss.compute():.4f} r2 {self.r2.compute():.3f}")
        self.mean_loss.reset()
        self.r2.reset()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, weight_decay=0.01)


trainer = L.Trainer(
    max_epochs=8,
    accelerator="cpu",
    precision="bf16-mixed",
    gradient_clip_val=1.0,
    accumulate_grad_batches=2,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(ClaimCost(), DataLoader(claims(1600), batch_size=32, shuffle=True))
