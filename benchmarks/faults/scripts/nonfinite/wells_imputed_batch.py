"""Permeability of wells from logs with gaps: the collate function fills a gap with the column's mean over the batch."""

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

COLUMNS = ("gamma", "density", "neutron", "sonic", "nmr", "resistivity")


class WellLogs(Dataset):
    """Samples by field and depth; a tool that was not run leaves NaN."""

    def __init__(self, n=480, seed=27):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(n, len(COLUMNS), generator=g)
        self.y = self.x @ torch.randn(len(COLUMNS), generator=g) + 0.1 * torch.randn(n, generator=g)
        missing = torch.rand(n, len(COLUMNS), generator=g) < 0.15
        missing[250:300, COLUMNS.index("nmr")] = True  # the old field never had the tool
        self.x[missing] = float("nan")

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return {"logs": self.x[i], "target": self.y[i]}


def collate(samples):
    logs = torch.stack([s["logs"] for s in samples])
    missing = torch.isnan(logs)
    mean = torch.nanmean(logs, dim=0)
    logs = torch.where(missing, mean, logs)
    return {"logs": torch.cat([logs, missing.float()], -1), "target": torch.stack([s["target"] for s in samples])}


class WellNet(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(2 * len(COLUMNS), width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1)
        )

    def forward(self, logs):
        return self.layers(logs).squeeze(-1)


class Runner:
    def __init__(self, model, lr):
        self.model = model
        self.optimizer = torch.optim.NAdam(model.parameters(), lr=lr)

    def training_step(self, batch):
        return nn.functional.huber_loss(self.model(batch["logs"]), batch["target"])

    def run(self, loader):
        for index, batch in enumerate(loader):
            loss = self.training_step(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if index % 5 == 0:
                print(f"batch {index} huber {loss.item():.4f}")


if __name__ == "__main__":
    torch.manual_seed(52)
    Runner(WellNet(), 4e-3).run(DataLoader(WellLogs(), batch_size=16, collate_fn=collate))
