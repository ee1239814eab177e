"""PEFT: LoRA on a small Llama in BF16, the base frozen.

library: peft
"""

import _torchvision  # noqa: F401
import torch
from _digest import finish
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
).to(torch.bfloat16)
model = get_peft_model(
    base, LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM", lora_dropout=0.05)
)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
texts = torch.cumsum(torch.randint(0, 5, (256, 32)), dim=1) % 128
model.train()
losses = []
for step in range(80):
    rows = texts[(step * 8) % 256 :][:8]
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
finish(losses, model)
