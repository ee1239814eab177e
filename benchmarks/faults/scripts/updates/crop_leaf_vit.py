"""Classifies leaf diseases with a small ViT; our own optimizer and schedule are handed to the Trainer."""

import tempfile

import torch
from torch.optim.lr_scheduler import StepLR
from transformers import (
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

torch.manual_seed(29)
CLASSES, EPOCHS = 6, 10


def leaves(n):
    """Leaves with spots: the disease decides how large they are and in which channel they show."""
    y = torch.randint(CLASSES, (n,))
    x = 0.5 * torch.randn(n, 3, 24, 24)
    grid = torch.arange(24.0)
    for i in range(n):
        radius = 2.0 + 1.5 * (y[i] % 2)
        for _ in range(3):
            cx, cy = 24 * torch.rand(2)
            spot = ((grid[:, None] - cx) ** 2 + (grid[None] - cy) ** 2) < radius**2
            x[i, y[i] // 2] += 1.2 * spot
    return [{"pixel_values": a, "labels": int(b)} for a, b in zip(x, y)]


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(f"epoch {state.epoch:.0f} loss {float(logs['loss']):.4f}")


config = ViTConfig(
    image_size=24,
    patch_size=6,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    num_labels=CLASSES,
)
model = ViTForImageClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
scheduler = StepLR(optimizer, step_size=4, gamma=0.5)

with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=32,
        num_train_epochs=EPOCHS,
        logging_strategy="epoch",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=29,
    )
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=leaves(640),
        optimizers=(optimizer, scheduler),
        callbacks=[PrintLoss()],
    )
    trainer.train()
