"""Probes a frozen BF16 encoder with a small FP32 head; the encoder's last layer is thawed half way, as FP32."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, vocab=500, dim=64, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 128, 0.0, batch_first=True) for _ in range(layers)
        )

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x.to(layer.linear1.weight.dtype), src_key_padding_mask=ids == 0)
        return x


class TicketClassifier(nn.Module):
    def __init__(self, classes=4):
        super().__init__()
        self.encoder = Encoder().to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(64, classes)

    def thaw(self):
        return list(self.encoder.layers[-1].float().requires_grad_().parameters())

    def forward(self, ids):
        x = self.encoder(ids).float()
        keep = (ids != 0).unsqueeze(-1)
        return self.head((x * keep).sum(1) / keep.sum(1))


torch.manual_seed(27)
model = TicketClassifier()
optimizer = torch.optim.AdamW(model.head.parameters(), lr=1e-2)
for step in range(120):
    if step == 60:
        optimizer.add_param_group({"params": model.thaw(), "lr": 3e-4})
    y = torch.randint(0, 4, (32,))
    ids = torch.where(
        torch.rand(32, 16) < 0.4,
        1 + y[:, None] * 100 + torch.randint(0, 100, (32, 16)),
        torch.randint(1, 500, (32, 16)),
    )
    ids[:, 4:] *= torch.arange(12) < torch.randint(1, 13, (32, 1))
    loss = F.cross_entropy(model(ids), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"step {step} loss {loss.item():.4f}")
