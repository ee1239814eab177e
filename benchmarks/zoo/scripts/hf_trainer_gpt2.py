"""Transformers Trainer: a small GPT-2, cosine schedule, BF16, accumulation.

library: transformers
"""

import _torchvision  # noqa: F401
import torch
from _digest import finish
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_callback import PrinterCallback

set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=64, n_embd=64, n_layer=3, n_head=4))
texts = torch.cumsum(torch.randint(0, 5, (256, 32)), dim=1) % 128
data = [{"input_ids": row, "labels": row} for row in texts]
arguments = TrainingArguments(
    "output",
    max_steps=60,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=1e-3,
    lr_scheduler_type="cosine",
    warmup_steps=6,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=True,
    use_cpu=True,
    disable_tqdm=True,
    seed=0,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data)
trainer.remove_callback(PrinterCallback)
trainer.train()
finish([entry["loss"] for entry in trainer.state.log_history if "loss" in entry], model)
