"""`Trainer`: BF16, gradient checkpointing, accumulation, clipping, fused AdamW."""

import torch
from common import ON_GPU, tell
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=500, n_positions=64))
texts = [{"input_ids": (tokens := torch.randint(500, (32,))), "labels": tokens} for _ in range(128)]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, max_steps=10, bf16=True, gradient_accumulation_steps=2, report_to=[],
    gradient_checkpointing=True, optim="adamw_torch_fused", save_strategy="no", use_cpu=not ON_GPU, seed=0,
)  # fmt: skip
Trainer(model, arguments, train_dataset=texts).train()
tell(model)
