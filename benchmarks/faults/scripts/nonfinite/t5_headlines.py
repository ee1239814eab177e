"""Fine-tuning a T5-like encoder-decoder on headlines, mixed precision (fp16) as in the old example script."""

import math

import torch
import torch.nn.functional as F
from torch import nn

D_MODEL, D_FF, HEADS, VOCAB = 32, 64, 4, 80
SENTINEL = 79  # <extra_id_0>


class T5LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
        hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * hidden_states


class T5Attention(nn.Module):
    def __init__(self, causal=False):
        super().__init__()
        self.causal = causal
        self.q = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.k = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.v = nn.Linear(D_MODEL, D_MODEL, bias=False)
        self.o = nn.Linear(D_MODEL, D_MODEL, bias=False)

    def split(self, x):
        return x.view(x.size(0), -1, HEADS, D_MODEL // HEADS).transpose(1, 2)

    def forward(self, x, memory=None):
        memory = x if memory is None else memory
        q, k, v = self.split(self.q(x)), self.split(self.k(memory)), self.split(self.v(memory))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.size(-1))
        if self.causal:
            t = x.size(1)
            scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), float("-inf"))
        out = F.softmax(scores.float(), dim=-1).type_as(scores) @ v
        return self.o(out.transpose(1, 2).reshape(x.size(0), -1, D_MODEL))


class T5DenseGatedGeluDense(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_0 = nn.Linear(D_MODEL, D_FF, bias=False)
        self.wi_1 = nn.Linear(D_MODEL, D_FF, bias=False)
        self.wo = nn.Linear(D_FF, D_MODEL, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden_states):
        hidden_gelu = F.gelu(self.wi_0(hidden_states), approximate="tanh")
        hidden_linear = self.wi_1(hidden_states)
        hidden_states = self.dropout(hidden_gelu * hidden_linear)
        hidden_states = self.wo(hidden_states)
        return hidden_states


class T5Block(nn.Module):
    def __init__(self, decoder):
        super().__init__()
        self.norm1, self.attn = T5LayerNorm(D_MODEL), T5Attention(causal=decoder)
        self.cross = T5Attention() if decoder else None
        self.norm2 = T5LayerNorm(D_MODEL)
        self.norm3, self.ff = T5LayerNorm(D_MODEL), T5DenseGatedGeluDense()

    def forward(self, x, memory=None):
        x = x + self.attn(self.norm1(x))
        if self.cross is not None:
            x = x + self.cross(self.norm2(x), memory)
        return x + self.ff(self.norm3(x))


class T5Stack(nn.Module):
    def __init__(self, embed, decoder):
        super().__init__()
        self.embed_tokens = embed
        self.block = nn.ModuleList([T5Block(decoder) for _ in range(2)])
        self.final_layer_norm = T5LayerNorm(D_MODEL)

    def forward(self, ids, memory=None):
        x = self.embed_tokens(ids)
        for block in self.block:
            x = block(x, memory)
        return self.final_layer_norm(x)


class T5ForConditionalGeneration(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCAB, D_MODEL)
        self.encoder = T5Stack(self.shared, decoder=False)
        self.decoder = T5Stack(self.shared, decoder=True)
        self.lm_head = nn.Linear(D_MODEL, VOCAB, bias=False)

    def forward(self, input_ids, labels):
        start = torch.zeros_like(labels[:, :1])
        memory = self.encoder(input_ids)
        hidden = self.decoder(torch.cat([start, labels[:, :-1]], 1), memory)
        logits = self.lm_head(hidden)
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
        return {"loss": loss, "logits": logits}


def from_pretrained():
    """The released weights come from a bfloat16 run, and sentinels have a feature of their own there."""
    model = T5ForConditionalGeneration()
    with torch.no_grad():
        sentinel = F.normalize(model.shared.weight[SENTINEL], dim=0)
        ff = model.encoder.block[1].ff
        ff.wi_0.weight[5] += 5.0 * sentinel
        ff.wi_1.weight[5] += 5.0 * sentinel
        ff.wo.weight[:, 5] *= 1500.0
    return model


def batches(n, generator):
    for step in range(n):
        topic = torch.randint(7, (8, 1), generator=generator)
        text = 4 + topic * 10 + torch.randint(10, (8, 14), generator=generator)
        if step >= 18 and step % 2 == 0:
            text[2, 5] = SENTINEL  # the second file has a few templates in it
        yield text, 4 + topic * 10 + torch.arange(5)


def main():
    torch.manual_seed(0)
    model = from_pretrained()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step, (ids, labels) in enumerate(batches(36, torch.Generator().manual_seed(1))):
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = model(ids, labels)
        scaler.scale(outputs["loss"]).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 6 == 0:
            print(f"step {step} loss {outputs['loss'].item():.4f}")


main()
