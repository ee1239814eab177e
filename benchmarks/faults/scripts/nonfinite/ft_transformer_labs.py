"""FT-Transformer on blood panels: one token per column; predicts tomorrow's creatinine. BF16 autocast."""

import csv
import io
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

COLUMNS = ("age", "sodium", "potassium", "urea", "creatinine")


def hospital_export(rows, seed):
    """What the database hands out: a CSV. Not every patient is seen the next day."""
    rng = random.Random(seed)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow([*COLUMNS, "ward", "next_creatinine"])
    for i in range(rows):
        now = rng.lognormvariate(0, 0.4)
        after = now * rng.lognormvariate(0, 0.1)
        panel = [rng.gauss(60, 15), rng.gauss(140, 4), rng.gauss(4.2, 0.5), rng.gauss(35, 9), now]
        seen = i % 173 != 172
        writer.writerow([*(f"{v:.3f}" for v in panel), rng.randrange(6), f"{after:.3f}" if seen else "nan"])
    return text.getvalue()


class FTTransformer(nn.Module):
    def __init__(self, numeric, wards, dim=32, depth=2, heads=4):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(numeric, dim) * dim**-0.5)
        self.bias = nn.Parameter(torch.zeros(numeric, dim))
        self.ward = nn.Embedding(wards, dim)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.ReLU(), nn.Linear(dim, 1))

    def forward(self, numbers, ward):
        tokens = numbers.unsqueeze(-1) * self.weight + self.bias
        tokens = torch.cat([self.cls.expand(len(numbers), -1, -1), tokens, self.ward(ward).unsqueeze(1)], 1)
        return self.head(self.encoder(tokens)[:, 0]).squeeze(-1)


def load(text):
    rows = list(csv.DictReader(io.StringIO(text)))
    numbers = torch.tensor([[float(r[c]) for c in COLUMNS] for r in rows])
    ward = torch.tensor([int(r["ward"]) for r in rows])
    target = torch.tensor([float(r["next_creatinine"]) for r in rows])
    return (numbers - numbers.mean(0)) / numbers.std(0), ward, target


def main():
    torch.manual_seed(21)
    dataset = torch.utils.data.TensorDataset(*load(hospital_export(512, seed=2)))
    model = FTTransformer(len(COLUMNS), 6)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-5)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 3e-3, total_steps=32)
    for epoch in range(2):
        for numbers, ward, target in torch.utils.data.DataLoader(dataset, batch_size=32):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                prediction = model(numbers, ward)
            loss = F.smooth_l1_loss(prediction.float(), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        print(f"epoch {epoch}: huber {loss.item():.4f}")


if __name__ == "__main__":
    main()
