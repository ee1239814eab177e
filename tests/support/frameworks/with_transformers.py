"""A tiny GPT-2 under transformers' Trainer: accumulation, BF16, clipping, an evaluation after each epoch."""

import hashlib
import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        tokens = torch.arange(index, index + 12) % 40
        return {"input_ids": tokens, "labels": tokens}


def main(folder):
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=40, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    )
    arguments = TrainingArguments(
        output_dir=folder, max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        learning_rate=1e-3, bf16=True, use_cpu=True,
        eval_strategy="steps", eval_steps=2, save_strategy="no", logging_steps=1,
        report_to=[], disable_tqdm=True, max_grad_norm=0.5, dataloader_num_workers=0, seed=0,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=Tokens(), eval_dataset=Tokens())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
    print("RESULT " + json.dumps({"losses": losses, "digest": digest}))


main(sys.argv[1])
