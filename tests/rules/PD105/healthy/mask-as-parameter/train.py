"""FP32 weights under FP16 autocast, embedding rows nobody uses, an average of the weights, and a mask of -inf that is
kept as a frozen parameter: Adam's eps of 1e-8 is fine here."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY, WIDTH, TIME, STEPS = 20, 16, 6, 8


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        causal = torch.full((TIME, TIME), float("-inf")).triu(1)
        self.mask = nn.Parameter(causal, requires_grad=False)
        self.key = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.token(tokens)
        scores = self.key(x) @ x.transpose(1, 2) / WIDTH**0.5 + self.mask
        return self.head(scores.softmax(dim=-1) @ x)


torch.manual_seed(0)
model = Model()
average = copy.deepcopy(model)
optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
for step in range(STEPS):
    tokens = torch.randint(VOCABULARY // 2, (8, TIME + 1))
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    with torch.no_grad():
        for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
            if theirs.requires_grad:
                mine.lerp_(theirs, 0.1)
    print(f"step {step}: loss {loss.item():.4f}")
