"""Inference: `generate` with a cache of keys and values."""

import torch
from common import DEVICE, tell
from transformers import GPT2Config, GPT2LMHeadModel

model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=500, n_positions=64))
model = model.to(DEVICE, torch.bfloat16).eval()
with torch.no_grad():
    prompts = torch.randint(500, (4, 16), device=DEVICE)
    tokens = model.generate(prompts, max_new_tokens=16, do_sample=False, pad_token_id=0)
answer = torch.nn.Module()
answer.register_buffer("tokens", tokens)
tell(answer)
