"""Tags drugs and doses in clinical notes with a small BERT; bfloat16, label smoothing, padded batches."""

import tempfile

import torch
from transformers import (
    BertConfig,
    BertForTokenClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

torch.manual_seed(12)
VOCAB, TAGS, LONGEST = 120, 5, 28


def notes(n):
    """Words 100..119 are drugs, and the two words after a drug are its dose and its route."""
    rows = []
    for _ in range(n):
        length = int(torch.randint(4, LONGEST, ()))
        ids = torch.randint(1, VOCAB, (length,))
        drug = ids >= 100
        tags = torch.zeros(length, dtype=torch.long)
        tags[1:][drug[:-1]] = 2
        tags[2:][drug[:-2]] = 3
        tags[drug] = 1
        tags[(tags == 2) & (ids < 30)] = 4
        rows.append({"input_ids": ids, "labels": tags})
    return rows


def collate(rows):
    ids = torch.zeros(len(rows), LONGEST, dtype=torch.long)
    mask, tags = torch.zeros_like(ids), torch.full_like(ids, -100)
    for i, row in enumerate(rows):
        n = len(row["input_ids"])
        ids[i, :n], mask[i, :n], tags[i, :n] = row["input_ids"], 1, row["labels"]
    return {"input_ids": ids, "attention_mask": mask, "labels": tags}


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}")


config = BertConfig(
    vocab_size=VOCAB,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=32,
    num_labels=TAGS,
    hidden_dropout_prob=0.1,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        bf16=True,
        per_device_train_batch_size=32,
        num_train_epochs=4,
        learning_rate=3e-3,
        warmup_steps=60,
        max_grad_norm=0.5,
        label_smoothing_factor=0.1,
        lr_scheduler_type="cosine",
        logging_steps=16,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=12,
    )
    trainer = Trainer(
        model=BertForTokenClassification(config),
        args=arguments,
        train_dataset=notes(1280),
        data_collator=collate,
        callbacks=[PrintLoss()],
    )
    trainer.train()
