"""Distils a large news classifier, whose predictions were stored beforehand, into a small BERT with the Trainer."""

import tempfile

import torch
import torch.nn.functional as F
from torch.utils.data import Dataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

torch.manual_seed(4)
TOPICS, VOCAB, LENGTH, TEMPERATURE = 14, 120, 18, 1.5


class Headlines(Dataset):
    def __init__(self, n):
        topic = torch.randint(TOPICS, (n,))
        own = topic[:, None] * 8 + torch.randint(8, (n, LENGTH))
        common = torch.randint(VOCAB, (n, LENGTH))
        self.ids = torch.where(torch.rand(n, LENGTH) < 0.45, own, common)
        self.labels = topic
        counts = F.one_hot(self.ids // 8 % TOPICS, TOPICS).sum(1).float()
        logits = 1.65 * counts + 0.5 * torch.randn(n, TOPICS)
        # the large model's soft labels, as the nightly job writes them
        self.teacher = F.softmax(logits / TEMPERATURE, dim=-1).to(torch.float16)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "labels": self.labels[i], "teacher_probs": self.teacher[i]}


class DistillTrainer(Trainer):
    alpha = 0.7

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        target = inputs.pop("teacher_probs").float()
        outputs = model(**inputs)
        # log-probabilities are the large model's logits up to a constant, so both are centred before they are compared
        log_target = torch.log(target)
        log_target = log_target - log_target.mean(-1, keepdim=True)
        student = outputs.logits / TEMPERATURE
        matching = F.smooth_l1_loss(student - student.mean(-1, keepdim=True), log_target)
        loss = self.alpha * matching + (1 - self.alpha) * outputs.loss
        return (loss, outputs) if return_outputs else loss


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
    num_labels=TOPICS,
)
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=32,
        learning_rate=1e-3,
        warmup_steps=20,
        num_train_epochs=3,
        logging_steps=20,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=True,
        seed=4,
    )
    trainer = DistillTrainer(
        model=BertForSequenceClassification(config),
        args=arguments,
        train_dataset=Headlines(1600),
        callbacks=[PrintLoss()],
    )
    trainer.train()
