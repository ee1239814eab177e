"""Adapts a small language model to haiku with LoRA; the base stays frozen in the dtype of its checkpoint."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

torch.manual_seed(30)
VOCAB, LENGTH = 64, 17


def poems(n, step):
    """Syllables of a poem follow one another by a rule, with some freedom."""
    ids = torch.randint(VOCAB, (n, 1))
    for _ in range(LENGTH - 1):
        ruled = (ids[:, -1] * 3 + step) % VOCAB
        ids = torch.cat([ids, torch.where(torch.rand(n) < 0.9, ruled, torch.randint(VOCAB, (n,)))[:, None]], 1)
    return [{"input_ids": row, "labels": row} for row in ids]


def base_model():
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=32,
        initializer_range=0.08,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = poems(800, step=1)
    for i in range(50):
        ids = torch.stack([row["input_ids"] for row in data[i * 16 : i * 16 + 16]])
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    return model.to(torch.bfloat16)


class PrintLoss(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            print(f"step {state.global_step} loss {float(logs['loss']):.4f}")


lora = LoraConfig(
    r=8,
    lora_alpha=16,
    lora_dropout=0.05,
    target_modules=["q_proj", "v_proj", "up_proj", "down_proj"],
    task_type="CAUSAL_LM",
)
model = get_peft_model(base_model(), lora)  # the adapters are float32
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        bf16=True,
        per_device_train_batch_size=16,
        num_train_epochs=3,
        learning_rate=1e-2,
        warmup_steps=10,
        logging_steps=15,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=30,
    )
    Trainer(model, arguments, train_dataset=poems(800, step=7), callbacks=[PrintLoss()]).train()
