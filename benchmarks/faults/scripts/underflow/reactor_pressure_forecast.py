"""Forecasts the pressure of a stirred reactor from its last minutes; a small network under the Trainer."""

import tempfile

import numpy as np
import torch
import torch.nn as nn
from transformers import Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(5)
rng = np.random.default_rng(5)
WINDOW = 12


def plant(n):
    """Jacket temperature in K, pressure in kPa, stirrer in rpm, one row per minute."""
    temperature, pressure, rpm = np.empty(n), np.empty(n), np.empty(n)
    temperature[0], pressure[0], rpm[0] = 350.0, 410.0, 240.0
    for i in range(1, n):
        temperature[i] = temperature[i - 1] + 0.1 * (350 - temperature[i - 1]) + rng.normal(0, 1.5)
        rpm[i] = 240 + 40 * np.sin(i / 40) + rng.normal(0, 4)
        target = 410 + 1.8 * (temperature[i - 1] - 350) - 0.2 * (rpm[i - 1] - 240)
        pressure[i] = pressure[i - 1] + 0.35 * (target - pressure[i - 1]) + rng.normal(0, 0.5)
    return np.stack([temperature, pressure, rpm], 1).astype(np.float32)


class Windows(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows) - WINDOW - 3

    def __getitem__(self, i):
        change = (self.rows[i + WINDOW + 2, 1] - self.rows[i + WINDOW - 1, 1]) / 5
        return {"window": self.rows[i : i + WINDOW], "labels": change}


class PressureNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(3 * WINDOW, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.out = nn.Linear(width, 1)

    def forward(self, window, labels=None):
        y = self.out(self.encode(window.flatten(1)))[:, 0]
        return {"loss": nn.functional.mse_loss(y, labels), "forecast": y}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}")


data = Windows(plant(2000))
model = PressureNet()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=32,
        num_train_epochs=5,
        learning_rate=1e-3,
        logging_steps=30,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[PrintLoss()])
    trainer.train()
