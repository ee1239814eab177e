"""Full fine-tuning of a small ViT that was loaded with torch_dtype=bfloat16; learning rate 2e-5 with warm-up."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class TrainingArguments:
    learning_rate: float = 2e-5
    warmup_ratio: float = 0.1
    weight_decay: float = 0.01
    max_steps: int = 140
    per_device_train_batch_size: int = 16
    logging_steps: int = 5
    max_grad_norm: float = 1.0
    seed: int = 608


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Layer(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.layernorm_before, self.layernorm_after = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, 4, batch_first=True)
        self.intermediate, self.output = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x):
        y = self.layernorm_before(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.output(nn.functional.gelu(self.intermediate(self.layernorm_after(x))))


class ViTForImageClassification(nn.Module):
    def __init__(self, hidden=64, layers=2, labels=4, size=16, patch=4):
        super().__init__()
        self.patch_embeddings = nn.Conv2d(3, hidden, patch, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, hidden))
        self.position_embeddings = nn.Parameter(0.1 * torch.randn(1, (size // patch) ** 2 + 1, hidden))
        self.encoder = nn.ModuleList(Layer(hidden) for _ in range(layers))
        self.layernorm, self.classifier = nn.LayerNorm(hidden), nn.Linear(hidden, labels)

    @classmethod
    def from_pretrained(cls, torch_dtype=torch.float32):
        return cls().to(torch_dtype)

    def forward(self, pixel_values, labels):
        x = self.patch_embeddings(pixel_values.to(self.patch_embeddings.weight.dtype)).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.position_embeddings
        for layer in self.encoder:
            x = layer(x)
        logits = self.classifier(self.layernorm(x)[:, 0])
        return Output(nn.functional.cross_entropy(logits.float(), labels), logits)


class Leaves(torch.utils.data.IterableDataset):
    def __init__(self, batch):
        self.batch = batch

    def __iter__(self):
        colours = torch.tensor([[1.0, 0.2, 0.1], [0.2, 1.0, 0.1], [0.8, 0.7, 0.1], [0.5, 0.3, 0.6]])
        while True:
            labels = torch.randint(4, (self.batch,))
            images = colours[labels][:, :, None, None] + 0.3 * torch.randn(self.batch, 3, 16, 16)
            yield {"pixel_values": images, "labels": labels}


class Trainer:
    def __init__(self, model, args):
        self.model, self.args = model, args
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=args.weight_decay)
        warmup = int(args.warmup_ratio * args.max_steps)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda s: s / warmup if s < warmup else max(0.0, (args.max_steps - s) / (args.max_steps - warmup)),
        )

    def train(self, dataset):
        self.model.train()
        running = 0.0
        for step, inputs in zip(range(1, self.args.max_steps + 1), dataset):
            loss = self.model(**inputs).loss
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            self.lr_scheduler.step()
            self.model.zero_grad()
            running += loss.item() / self.args.logging_steps
            if step % self.args.logging_steps == 0:
                print(f"{step}/{self.args.max_steps} loss = {running:.4f} grad_norm = {float(norm):.3f}")
                running = 0.0


if __name__ == "__main__":
    args = TrainingArguments()
    torch.manual_seed(args.seed)
    model = ViTForImageClassification.from_pretrained(torch_dtype=torch.bfloat16)
    Trainer(model, args).train(Leaves(args.per_device_train_batch_size))
