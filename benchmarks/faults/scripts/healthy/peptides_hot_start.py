"""Peptide retention in FP16: the scaler starts far too high, at 2**28, and finds its level in the first steps."""

import torch
import torch.nn.functional as F
from torch import nn


class PeptideNet(nn.Module):
    def __init__(self, residues=20, width=32):
        super().__init__()
        self.residue = nn.Embedding(residues, width)
        self.conv1 = nn.Conv1d(width, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)
        self.minutes = nn.Linear(width, 1)

    def forward(self, peptide):
        x = self.residue(peptide).transpose(1, 2)
        x = x + F.gelu(self.conv1(x))
        x = x + F.gelu(self.conv2(x))
        return self.minutes(x.sum(-1)).squeeze(-1)


def main():
    torch.manual_seed(102)
    hydrophobicity = torch.randn(20)
    model = PeptideNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**28, growth_interval=80)
    for step in range(260):
        peptide = torch.randint(20, (32, 14))
        minutes = hydrophobicity[peptide].sum(1) + 0.1 * torch.randn(32)
        with torch.autocast("cpu", dtype=torch.float16):
            predicted = model(peptide)
        loss = F.smooth_l1_loss(predicted.float(), minutes)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 13 == 12:
            print(f"step {step + 1} loss {loss.item():.4f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    main()
