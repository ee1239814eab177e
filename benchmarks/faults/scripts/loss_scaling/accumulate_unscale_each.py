"""Gradient accumulation in a home-made Accelerator: every micro-batch unscales and clips what has been summed so far."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Accelerator:
    def __init__(self, gradient_accumulation_steps=1, mixed_precision="fp16"):
        self.steps = gradient_accumulation_steps
        self.dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[mixed_precision]
        self.scaler = torch.amp.GradScaler("cpu", enabled=mixed_precision == "fp16")
        self.count = 0

    @property
    def sync_gradients(self):
        return self.count % self.steps == 0

    def autocast(self):
        return torch.autocast("cpu", dtype=self.dtype)

    def backward(self, loss):
        self.count += 1
        self.scaler.scale(loss / self.steps).backward()

    def clip_grad_norm_(self, optimizer, parameters, max_norm):
        self.scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self, optimizer):
        if self.sync_gradients:
            self.scaler.step(optimizer)
        self.scaler.update()
        if self.sync_gradients:
            optimizer.zero_grad()


class TextCNN(nn.Module):
    def __init__(self, vocab=200, dim=24, filters=16, classes=6):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(dim, filters, k, padding=k // 2) for k in (3, 5))
        self.dropout = nn.Dropout(0.1)
        self.fc = nn.Linear(2 * filters, classes)

    def forward(self, ids):
        x = self.embedding(ids).transpose(1, 2)
        x = torch.cat([F.relu(conv(x)).amax(-1) for conv in self.convs], 1)
        return self.fc(self.dropout(x))


def questions(n, length=24):
    label = torch.randint(6, (n,))
    ids = torch.randint(30, 200, (n, length))
    at = torch.randint(length - 2, (n,))
    rows = torch.arange(n)
    ids[rows, at], ids[rows, at + 1] = 1 + label, 10 + label
    noisy = torch.where(torch.rand(n) < 0.25, torch.randint(6, (n,)), label)
    return ids, noisy


def main():
    torch.manual_seed(605)
    accelerator = Accelerator(gradient_accumulation_steps=8)
    model = TextCNN()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    running = 0.0
    for step in range(8 * 80):
        ids, labels = questions(4)
        with accelerator.autocast():
            logits = model(ids)
        loss = F.cross_entropy(logits.float(), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(optimizer, model.parameters(), 1.0)
        accelerator.step(optimizer)
        running += loss.item() / 16
        if step % 16 == 15:
            print(f"step {step // 8} loss {running:.4f}")
            running = 0.0


if __name__ == "__main__":
    main()
