"""Names the product class of a reaction with a tiny T5: Adafactor, gradient checkpointing, accumulated batches."""

import tempfile

import torch
from transformers import (
    T5Config,
    T5ForConditionalGeneration,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

torch.manual_seed(18)
VOCAB, LENGTH = 40, 10


def reactions(n):
    """The groups of a molecule mostly belong to its family, whose three-letter code is asked for; padded sources."""
    rows = []
    for _ in range(n):
        length = int(torch.randint(4, LENGTH + 1, ()))
        family = torch.randint(6, ())
        groups = torch.where(torch.rand(length) < 0.7, 2 + 6 * family, 2 + 6 * torch.randint(6, (length,)))
        source = torch.zeros(LENGTH, dtype=torch.long)
        source[:length] = groups + torch.randint(6, (length,))
        labels = torch.stack([2 + family, 10 + (family * 5) % 7, torch.tensor(1)])
        rows.append({"input_ids": source, "attention_mask": (source != 0).long(), "labels": labels})
    return rows


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}")


config = T5Config(
    vocab_size=VOCAB,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config)
model.config.use_cache = False
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        optim="adafactor",
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        gradient_checkpointing=True,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_train_epochs=5,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=18,
    )
    Trainer(model, arguments, train_dataset=reactions(800), callbacks=[PrintLoss()]).train()
