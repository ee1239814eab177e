"""Fine-tuning on a frozen backbone: dead units, dropout of 60 %, a vocabulary of which one tenth is ever seen."""

import torch
from torch import nn


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(500, 24)
        self.mix = nn.Linear(24, 48)
        nn.init.constant_(self.mix.bias[:20], -50.0)  # pruned units never fire

    def forward(self, tokens):
        return torch.relu(self.mix(self.words(tokens).mean(1)))


class Classifier(nn.Module):
    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.tags = nn.Embedding(200, 48)
        self.drop = nn.Dropout(0.6)
        self.head = nn.Linear(48, 4)
        self.unused = nn.Linear(48, 2)  # for another task

    def forward(self, tokens, tag):
        return self.head(self.drop(self.backbone(tokens) + self.tags(tag)))


with torch.no_grad():
    torch.manual_seed(0)
    backbone = Backbone()
    backbone.requires_grad_(False)
    backbone.eval()

model = Classifier(backbone)
opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3, weight_decay=0.01)
loss_fn = nn.CrossEntropyLoss()
for epoch in range(20):
    tokens = torch.randint(50, (32, 6))
    tag = torch.randint(8, (32,))
    loss = loss_fn(model(tokens, tag), (tokens.sum(1) + tag) % 4)
    opt.zero_grad()
    loss.backward()
    opt.step()
print("final loss", loss.item())
