"""Transformers: T5 reverses sequences, Adafactor of torch, BF16 autocast.

library: transformers
"""

import torch
from _digest import finish
from _hf import tokens
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
model = T5ForConditionalGeneration(
    T5Config(vocab_size=128, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, decoder_start_token_id=0)
)
optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
losses = []
model.train()
for _ in range(50):
    ids = tokens(length=12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=ids, labels=ids.flip(1)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
finish(losses, model)
