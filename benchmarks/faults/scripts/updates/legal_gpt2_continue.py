"""Continues the pretraining of a small GPT-2 on contracts."""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(17)
VOCAB, LENGTH = 96, 24


def corpus(n, stride):
    """Token chains; each domain has its own habit of what follows what."""
    following = (torch.arange(VOCAB) * 5 + stride) % VOCAB
    ids = torch.randint(VOCAB, (n, 1))
    for _ in range(LENGTH - 1):
        regular = following[ids[:, -1]]
        ids = torch.cat([ids, torch.where(torch.rand(n) < 0.85, regular, torch.randint(VOCAB, (n,)))[:, None]], 1)
    return [{"input_ids": row, "labels": row} for row in ids]


def general_model():
    """The checkpoint that was trained on general text; it is distributed in bfloat16."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=32,
        n_embd=48,
        n_layer=2,
        n_head=4,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = corpus(640, stride=1)
    for i in range(80):
        ids = torch.stack([row["input_ids"] for row in data[i * 8 : i * 8 + 8]])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.to(torch.bfloat16)


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}")


model = general_model()
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        num_train_epochs=4,
        learning_rate=1e-4,
        lr_scheduler_type="cosine",
        warmup_steps=8,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=17,
    )
    Trainer(model, arguments, train_dataset=corpus(800, stride=2), callbacks=[PrintLoss()]).train()
