"""LoRA on a small BERT, base frozen; padding by (1 - mask) * finfo.min, some reviews are a single token."""

import math
from dataclasses import dataclass, field

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class BertConfig:
    vocab_size: int = 120
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_labels: int = 2
    lora_r: int = 4
    lora_alpha: int = 8
    target_modules: list = field(default_factory=lambda: ["query", "value"])


class LoraLinear(nn.Module):
    def __init__(self, base, r, alpha):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, r, bias=False)
        self.lora_B = nn.Linear(r, base.out_features, bias=False)
        self.scaling = alpha / r
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x)) * self.scaling


class BertSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.size = c.num_attention_heads, c.hidden_size // c.num_attention_heads
        self.query, self.key, self.value = (nn.Linear(c.hidden_size, c.hidden_size) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, self.size).transpose(1, 2)

    def forward(self, x, extended_mask):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.size) + extended_mask
        probs = self.dropout(scores.softmax(dim=-1))
        return (probs @ v).transpose(1, 2).reshape(x.shape)


class BertLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.attention, self.output = BertSelfAttention(c), nn.Linear(c.hidden_size, c.hidden_size)
        self.norm1, self.norm2 = nn.LayerNorm(c.hidden_size), nn.LayerNorm(c.hidden_size)
        self.ffn = nn.Sequential(nn.Linear(c.hidden_size, 64), nn.GELU(), nn.Linear(64, c.hidden_size))

    def forward(self, x, mask):
        x = self.norm1(x + self.output(self.attention(x, mask)))
        return self.norm2(x + self.ffn(x))


class BertForSequenceClassification(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embeddings = nn.Embedding(c.vocab_size, c.hidden_size, padding_idx=0)
        self.layers = nn.ModuleList(BertLayer(c) for _ in range(c.num_hidden_layers))
        self.classifier = nn.Linear(c.hidden_size, c.num_labels)

    def forward(self, input_ids, attention_mask, labels=None):
        x = self.embeddings(input_ids)
        mask = (1.0 - attention_mask[:, None, None, :].to(x.dtype)) * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.classifier(x[:, 0])
        return {"loss": F.cross_entropy(logits, labels) if labels is not None else None, "logits": logits}


def get_peft_model(model, c):
    model.requires_grad_(False)
    for layer in model.layers:
        for name in c.target_modules:
            setattr(layer.attention, name, LoraLinear(getattr(layer.attention, name), c.lora_r, c.lora_alpha))
    model.classifier.requires_grad_(True)
    return model


def reviews(n):
    lengths = torch.randint(1, 13, (n,))
    labels = torch.randint(2, (n,))
    ids = torch.randint(20, 120, (n, 12))
    ids[:, 0] = 2 + labels * 3 + torch.randint(3, (n,))
    mask = (torch.arange(12)[None] < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


torch.manual_seed(12)
config = BertConfig()
model = get_peft_model(BertForSequenceClassification(config), config)
trainable = [p for p in model.parameters() if p.requires_grad]
print(f"trainable params: {sum(p.numel() for p in trainable)} of {sum(p.numel() for p in model.parameters())}")
optimizer = torch.optim.AdamW(trainable, lr=1e-2, weight_decay=0.0)
for step in range(50):
    outputs = model(**reviews(16))
    outputs["loss"].backward()
    nn.utils.clip_grad_norm_(trainable, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print({"step": step, "loss": round(outputs["loss"].item(), 4)})
