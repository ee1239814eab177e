"""Low-rank adapters around the linear layers of a frozen model."""

import torch
from torch import nn


class LoRaLayer(nn.Module):
    def __init__(self, linear, rank, alpha, dropout=0.0):
        super().__init__()
        self.original_layer = linear
        self.dropout = nn.Dropout(dropout)
        std_dev = 1 / rank**0.5
        self.A = nn.Parameter((torch.rand(linear.in_features, rank) * 2 - 1) * std_dev)
        self.B = nn.Parameter(torch.zeros(rank, linear.out_features))
        self.alpha = alpha

    def forward(self, x):
        return self.original_layer(x) + self.alpha * (self.dropout(x) @ self.A @ self.B)


def get_peft_model(model, names, rank, alpha):
    model.requires_grad_(False)
    for name in names:
        owner, _, key = name.rpartition(".")
        parent = model.get_submodule(owner)
        setattr(parent, key, LoRaLayer(getattr(parent, key), rank, alpha))
    return model
