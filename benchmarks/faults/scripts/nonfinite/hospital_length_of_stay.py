"""Length of stay from laboratory values and a ward embedding, trained with the Hugging Face Trainer."""

import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(8)
rng = np.random.default_rng(8)


def admissions(n):
    """One row per admission: age, lab values at arrival, and two ratios that the clinicians asked for."""
    age = rng.uniform(18, 95, n)
    creatinine = rng.lognormal(0.0, 0.4, n).round(1)
    urea = (creatinine * rng.lognormal(2.6, 0.3, n)).round(0)
    troponin = np.where(rng.random(n) < 0.6, 0.0, rng.lognormal(-2.5, 1.0, n)).round(3)
    ck = np.where(rng.random(n) < 0.002, 0.0, rng.lognormal(4.5, 0.6, n)).round(0)
    ward = rng.integers(0, 6, n)
    with np.errstate(all="ignore"):
        ratios = np.stack([urea / creatinine, troponin / ck], 1)
    table = np.concatenate([np.stack([age, creatinine, urea, troponin, ck], 1), ratios], 1)
    days = 2 + 0.05 * age + 1.5 * creatinine + 4 * troponin + 0.5 * ward + rng.normal(0, 0.7, n)
    return table.astype(np.float32), ward, days.astype(np.float32)


class Admissions(torch.utils.data.Dataset):
    def __init__(self, n):
        table, self.ward, self.days = admissions(n)
        centre, spread = np.nanmedian(table, axis=0), np.nanstd(table, axis=0)
        self.table = ((table - centre) / spread).clip(-8, 8)

    def __len__(self):
        return len(self.days)

    def __getitem__(self, i):
        return {"table": self.table[i], "ward": int(self.ward[i]), "labels": float(np.log1p(self.days[i]))}


class StayRegressor(nn.Module):
    def __init__(self, columns=7, width=48):
        super().__init__()
        self.ward = nn.Embedding(6, 8)
        self.body = nn.Sequential(
            nn.Linear(columns + 8, width), nn.LayerNorm(width), nn.SiLU(), nn.Dropout(0.1), nn.Linear(width, width)
        )
        self.head = nn.Sequential(nn.SiLU(), nn.Linear(width, 1))

    def forward(self, table, ward, labels=None):
        y = self.head(self.body(torch.cat([table, self.ward(ward)], -1)))[:, 0]
        return {"loss": F.smooth_l1_loss(y, labels.float()), "prediction": y}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(f"epoch {state.epoch:.1f} loss {float(logs['loss']):.4f}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            weight_decay=0.01,
            num_train_epochs=3,
            lr_scheduler_type="cosine",
            logging_steps=25,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        Trainer(StayRegressor(), arguments, train_dataset=Admissions(2048), callbacks=[PrintLoss()]).train()


if __name__ == "__main__":
    main()
