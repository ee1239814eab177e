"""Transformers: BERT predicts masked tokens, padding and all.

library: transformers
"""

import torch
from _digest import finish
from _hf import tokens, train
from transformers import BertConfig, BertForMaskedLM

torch.manual_seed(0)
model = BertForMaskedLM(
    BertConfig(vocab_size=130, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128)
)


def batch():
    ids = tokens()
    attention = (torch.arange(24) < torch.randint(12, 25, (8, 1))).long()
    masked = (torch.rand(8, 24) < 0.15) & attention.bool()
    return {
        "input_ids": ids.masked_fill(masked, 129).masked_fill(attention == 0, 128),
        "attention_mask": attention,
        "labels": ids.masked_fill(~masked, -100),
    }


finish(train(model, batch, steps=60), model)
