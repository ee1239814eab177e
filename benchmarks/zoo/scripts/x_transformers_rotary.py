"""x-transformers: a decoder with rotary positions, GLU, flash-free attention and a BF16 autocast.

library: x-transformers
"""

import torch
from _digest import finish
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
model = AutoregressiveWrapper(
    TransformerWrapper(
        num_tokens=64,
        max_seq_len=32,
        attn_layers=Decoder(
            dim=48, depth=3, heads=4, attn_dim_head=12, rotary_pos_emb=True, ff_glu=True, use_rmsnorm=True
        ),
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
losses = []
for _ in range(50):
    ids = (torch.randint(0, 64, (8, 1)) + torch.randint(1, 4, (8, 1)) * torch.arange(25)) % 64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(ids)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    losses.append(loss.item())
finish(losses, model)
