"""A trainer with gradient accumulation that normalises by the number of target tokens of the whole step."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class TrainingArguments:
    learning_rate: float = 3e-3
    max_steps: int = 24
    per_device_batch_size: int = 2
    gradient_accumulation_steps: int = 2
    warmup_steps: int = 4
    max_grad_norm: float = 1.0
    logging_steps: int = 4


class Trainer:
    def __init__(self, model, args, dataset, collator):
        self.model, self.args, self.dataset, self.collator = model, args, dataset, collator
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.schedule)

    def schedule(self, step):
        if step < self.args.warmup_steps:
            return (step + 1) / self.args.warmup_steps
        return max(0.0, (self.args.max_steps - step) / (self.args.max_steps - self.args.warmup_steps))

    def get_batch_samples(self, batches):
        samples = [next(batches) for _ in range(self.args.gradient_accumulation_steps)]
        num_items = sum((batch["labels"][:, 1:] != -100).sum() for batch in samples)
        return samples, num_items

    def compute_loss(self, batch, num_items_in_batch):
        logits = self.model(batch["input_ids"])
        shifted = batch["labels"][:, 1:].flatten()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), shifted, ignore_index=-100, reduction="sum")
        return loss / num_items_in_batch

    def train(self):
        size = self.args.per_device_batch_size
        batches = (self.collator(self.dataset[i : i + size]) for i in range(0, len(self.dataset), size))
        for step in range(self.args.max_steps):
            samples, num_items = self.get_batch_samples(batches)
            step_loss = 0.0
            for batch in samples:
                loss = self.compute_loss(batch, num_items)
                loss.backward()
                step_loss += loss.item()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.args.max_grad_norm)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            if step % self.args.logging_steps == 0:
                print({"step": step, "loss": round(step_loss, 4), "tokens": int(num_items)})
