"""OPT-like decoder: positions are counted from the attention mask, for left padding."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class LearnedPositions(nn.Embedding):
    def forward(self, attention_mask):
        positions = torch.zeros_like(attention_mask[:, 0])
        table = []
        for t in range(attention_mask.shape[1]):
            positions = positions + attention_mask[:, t]
            table.append(positions)
        positions = (torch.stack(table, 1) - 1).clamp(min=0).long()
        return super().forward(positions)


class Decoder(nn.Module):
    def __init__(self, vocab=40, dim=32, longest=384):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.embed_positions = LearnedPositions(longest, dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)
        self.lm_head = nn.Linear(dim, vocab)

    def forward(self, ids, mask):
        x = self.embed_tokens(ids) + self.embed_positions(mask)
        x = x + self.fc2(F.relu(self.fc1(x)))
        return self.lm_head(x)


def forms(n, template, length=384):
    ids = torch.where(torch.rand(n, length) < 0.9, template.expand(n, -1), torch.randint(0, 40, (n, length)))
    lengths = torch.randint(300, length + 1, (n,))
    pad = length - lengths
    shifted = torch.zeros_like(ids)
    mask = torch.zeros(n, length)
    for i, p in enumerate(pad.tolist()):
        shifted[i, p:] = ids[i, : length - p]
        mask[i, p:] = 1
    return shifted, mask


def main():
    torch.manual_seed(19)
    template = torch.randint(0, 40, (384,))
    model = Decoder()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dtype = torch.bfloat16
    for step in range(70):
        ids, mask = forms(8, template)
        with torch.autocast("cpu", dtype=dtype):
            logits = model(ids[:, :-1], mask[:, :-1].to(dtype))
        target = torch.where(mask[:, 1:] > 0, ids[:, 1:], -100)
        loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=-100)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f}")
    return model


model = main()
