"""LoRA on BF16 weights by PEFT, with Accelerate's accumulation and clipping."""

import peft
import torch
from accelerate import Accelerator
from common import ON_GPU, tell
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(mixed_precision="bf16", cpu=not ON_GPU, gradient_accumulation_steps=2)
config = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=500
)  # fmt: skip
model = LlamaForCausalLM(config).to(torch.bfloat16)
model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), 1e-3)
loader = torch.utils.data.DataLoader(torch.randint(500, (64, 32)), 4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for tokens in loader:
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
tell(accelerator.unwrap_model(model))
