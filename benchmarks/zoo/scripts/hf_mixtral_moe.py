"""Transformers: Mixtral with four experts and its router's auxiliary loss.

library: transformers
"""

import torch
from _digest import finish
from _hf import tokens, train
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
model = MixtralForCausalLM(
    MixtralConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        output_router_logits=True,
        use_cache=False,
    )
)


def batch():
    ids = tokens()
    return {"input_ids": ids, "labels": ids}


finish(train(model, batch, lr=2e-3), model)
