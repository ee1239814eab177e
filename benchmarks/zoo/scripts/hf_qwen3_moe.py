"""Transformers: Qwen3-MoE, eight experts, two per token.

library: transformers
"""

import torch
from _digest import finish
from _hf import tokens, train
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

torch.manual_seed(0)
model = Qwen3MoeForCausalLM(
    Qwen3MoeConfig(
        vocab_size=128,
        hidden_size=48,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        num_experts=8,
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
