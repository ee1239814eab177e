"""A character model; the optimizer became AdamW, and the learning rate remained SGD's."""

import torch
import torch.nn as nn
from torch.nn import functional as F

hyper = {"batch_size": 16, "block_size": 24, "lr": 0.1, "iters": 200, "eval_interval": 50}
shape = {"n_embd": 32, "n_head": 4, "n_layer": 2, "block_size": 24}
torch.manual_seed(512)

words = "the cat sat on the mat while a dog ran to the red hat and the rat hid in a den of ten men "
text = "".join(words.split()[i] + " " for i in torch.randint(len(words.split()), (1500,)).tolist())
chars = sorted(set(text))
stoi = {c: i for i, c in enumerate(chars)}
data = torch.tensor([stoi[c] for c in text])
n = int(0.9 * len(data))
splits = {"train": data[:n], "val": data[n:]}


def get_batch(split):
    d = splits[split]
    ix = torch.randint(len(d) - hyper["block_size"] - 1, (hyper["batch_size"],))
    x = torch.stack([d[i : i + hyper["block_size"]] for i in ix])
    y = torch.stack([d[i + 1 : i + hyper["block_size"] + 1] for i in ix])
    return x, y


class Head(nn.Module):
    def __init__(self, n_embd, head_size, block_size):
        super().__init__()
        self.key = nn.Linear(n_embd, head_size, bias=False)
        self.query = nn.Linear(n_embd, head_size, bias=False)
        self.value = nn.Linear(n_embd, head_size, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(block_size, block_size)))

    def forward(self, x):
        T = x.shape[1]
        k, q = self.key(x), self.query(x)
        wei = q @ k.transpose(-2, -1) * k.shape[-1] ** -0.5
        wei = wei.masked_fill(self.tril[:T, :T] == 0, float("-inf"))
        return F.softmax(wei, dim=-1) @ self.value(x)


class Block(nn.Module):
    def __init__(self, n_embd, n_head, block_size):
        super().__init__()
        self.heads = nn.ModuleList(Head(n_embd, n_embd // n_head, block_size) for _ in range(n_head))
        self.proj = nn.Linear(n_embd, n_embd)
        self.ffwd = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.ReLU(), nn.Linear(4 * n_embd, n_embd))
        self.ln1, self.ln2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)

    def forward(self, x):
        y = self.ln1(x)
        x = x + self.proj(torch.cat([h(y) for h in self.heads], dim=-1))
        return x + self.ffwd(self.ln2(x))


class BigramPlus(nn.Module):
    def __init__(self, vocab_size, n_embd, n_head, n_layer, block_size):
        super().__init__()
        self.token_embedding_table = nn.Embedding(vocab_size, n_embd)
        self.position_embedding_table = nn.Embedding(block_size, n_embd)
        self.blocks = nn.Sequential(*[Block(n_embd, n_head, block_size) for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size)

    def forward(self, idx, targets=None):
        B, T = idx.shape
        x = self.token_embedding_table(idx) + self.position_embedding_table(torch.arange(T))
        logits = self.lm_head(self.ln_f(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(B * T, -1), targets.view(B * T))


@torch.no_grad()
def estimate(model):
    model.eval()
    out = {s: torch.tensor([model(*get_batch(s))[1].item() for _ in range(3)]).mean() for s in splits}
    model.train()
    return out


model = BigramPlus(len(chars), **shape)
optimizer = torch.optim.AdamW(model.parameters(), lr=hyper["lr"])
for it in range(hyper["iters"]):
    if it % hyper["eval_interval"] == 0:
        nll = estimate(model)
        print(f"step {it}: train nll {nll['train']:.4f}, val nll {nll['val']:.4f}")
    xb, yb = get_batch("train")
    logits, loss = model(xb, yb)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    optimizer.step()
    if it % 4 == 0:
        print(f"{it:4d} loss {loss.item():.4f}")
