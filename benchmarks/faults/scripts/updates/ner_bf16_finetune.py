"""Pretrain a small tagger in FP32, then load it in bfloat16 and fine-tune it on new tags with a small learning rate."""

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, LENGTH, TAGS = 64, 16, 8


class Tagger(nn.Module):
    def __init__(self, d_model=48, nhead=4):
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCAB, d_model)
        self.position_embeddings = nn.Embedding(LENGTH, d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead, 4 * d_model, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.classifier = nn.Linear(d_model, TAGS)

    def forward(self, ids):
        h = self.word_embeddings(ids) + self.position_embeddings(torch.arange(ids.shape[1]))
        return self.classifier(self.encoder(h))


def train(model, dictionary, steps, lr, name):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    for step in range(steps):
        ids = torch.randint(VOCAB, (16, LENGTH))
        logits = model(ids)
        loss = F.cross_entropy(logits.float().flatten(0, 1), dictionary[ids].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"{name} step {step:3d} loss {loss.item():.4f}")


torch.manual_seed(2101)
general, domain = torch.randint(TAGS, (2, VOCAB))
domain[:40] = general[:40]  # most words keep their tag
model = Tagger()
train(model, general, 50, 2e-3, "pretrain")
model = model.to(torch.bfloat16)
train(model, domain, 100, 5e-5, "finetune")
