"""A block drafter: two layers on the hidden states of a target model, with norms on queries and keys."""

import torch.nn.functional as F
from torch import nn

DIM, HEADS, VOCAB = 32, 4, 48


class DraftLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(DIM, 1e-6), nn.RMSNorm(DIM, 1e-6)
        self.q_norm, self.k_norm = nn.RMSNorm(DIM // HEADS, 1e-6), nn.RMSNorm(DIM // HEADS, 1e-6)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.gate_proj, self.up_proj = nn.Linear(DIM, 64, bias=False), nn.Linear(DIM, 64, bias=False)
        self.down_proj = nn.Linear(64, DIM, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        h = self.input_layernorm(x)
        q, k, v = (p(h).view(b, t, HEADS, -1).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(b, t, DIM))
        h = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class DraftModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(DIM, DIM, bias=False)
        self.layers = nn.Sequential(DraftLayer(), DraftLayer())
        self.norm = nn.RMSNorm(DIM, 1e-6)
        self.lm_head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, hidden):
        return self.lm_head(self.norm(self.layers(self.fc(hidden))))


class Target(nn.Module):
    """The frozen model whose next tokens the drafter shall guess."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.rnn = nn.GRU(DIM, DIM, batch_first=True)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        hidden = self.embed(ids)
        return hidden, 6 * self.head(self.rnn(2 * hidden)[0])
