"""Transformers: Mamba by its slow path, the scan written in plain torch.

library: transformers
"""

import torch
from _digest import finish
from _hf import tokens, train
from transformers import MambaConfig, MambaForCausalLM

torch.manual_seed(0)
model = MambaForCausalLM(
    MambaConfig(vocab_size=128, hidden_size=48, state_size=8, num_hidden_layers=2, expand=2, use_cache=False)
)


def batch():
    ids = tokens(length=16)
    return {"input_ids": ids, "labels": ids}


finish(train(model, batch, lr=3e-3), model)
