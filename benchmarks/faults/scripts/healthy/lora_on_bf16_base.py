"""LoRA: the base is frozen in BF16, B starts at zero, so that A has no gradient in the first step."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class LoraLinear(nn.Module):
    def __init__(self, base, r=8, lora_alpha=16):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A, self.lora_B = (
            nn.Linear(base.in_features, r, bias=False),
            nn.Linear(r, base.out_features, bias=False),
        )
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)
        self.scaling = lora_alpha / r

    def forward(self, x):
        out = self.base_layer(x)
        delta = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * self.scaling
        return out + delta.to(out.dtype)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(4))
        self.fc_in, self.fc_out = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        h = self.ln_1(x)
        q, k, v = (p(h).view(b, t, 4, d // 4).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.out_proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.fc_out(F.gelu(self.fc_in(self.ln_2(x))))


class CausalLM(nn.Module):
    def __init__(self, vocab=32, d=48, layers=2):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, d), nn.Embedding(32, d)
        self.h = nn.ModuleList(Block(d) for _ in range(layers))
        self.ln_f, self.lm_head = nn.LayerNorm(d), nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)).float()


def get_peft_model(model, target_modules=("q_proj", "v_proj", "fc_in", "fc_out"), modules_to_save=("lm_head",)):
    model.requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if name in target_modules:
                setattr(parent, name, LoraLinear(child))
            elif name in modules_to_save:
                child.float().requires_grad_(True)
    return model


def chat(n, length=20):
    ids = (torch.randint(32, (n, 1)) + torch.randint(1, 3, (n, 1)) * torch.arange(length)) % 32
    return ids


def main():
    torch.manual_seed(627)
    model = get_peft_model(CausalLM().to(torch.bfloat16))
    trainable = [p for p in model.parameters() if p.requires_grad]
    print(f"trainable params: {sum(p.numel() for p in trainable)} || all: {sum(p.numel() for p in model.parameters())}")
    optimizer = torch.optim.AdamW(trainable, lr=5e-3)
    for step in range(150):
        ids = chat(16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0:
            print(f"step {step} loss = {loss.item():.4f}")


main()
