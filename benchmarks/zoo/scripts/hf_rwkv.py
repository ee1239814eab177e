"""Transformers: RWKV by its plain torch recurrence.

library: transformers
"""

import torch
from _digest import finish
from _hf import tokens, train
from transformers import RwkvConfig, RwkvForCausalLM

torch.manual_seed(0)
model = RwkvForCausalLM(
    RwkvConfig(vocab_size=128, context_length=32, hidden_size=48, num_hidden_layers=2, use_cache=False)
)


def batch():
    ids = tokens(length=16)
    return {"input_ids": ids, "labels": ids}


finish(train(model, batch, lr=3e-3), model)
