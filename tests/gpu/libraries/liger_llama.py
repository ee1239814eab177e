"""A Llama with Liger's kernels, which are Triton's: norms, rotation, SwiGLU, and the loss with the last product."""

import torch
from common import DEVICE, ON_GPU, skip, tell
from liger_kernel.transformers import apply_liger_kernel_to_llama
from transformers import LlamaConfig, LlamaForCausalLM

if not ON_GPU:
    skip("its kernels need a GPU")
apply_liger_kernel_to_llama()
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=500
)  # fmt: skip
model = LlamaForCausalLM(config).to(DEVICE)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
tokens = torch.randint(500, (4, 64), device=DEVICE)
for _ in range(20):
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
tell(model)
