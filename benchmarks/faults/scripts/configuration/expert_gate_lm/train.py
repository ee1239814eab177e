"""Language model with a mixture of experts, in the param_dtype of FSDP with FP32 copies for the optimizer."""

import torch
import torch.nn.functional as F
from moe import MoE
from torch import nn

torch.manual_seed(2389)
param_dtype = torch.bfloat16
gate_dtype = param_dtype
VOCAB, LENGTH, DIM, EXPERTS = 64, 12, 32, 16
topics = (torch.randn(4, VOCAB, VOCAB) * 2).softmax(-1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Conv1d(DIM, DIM, 3, padding=2)
        self.norm1, self.norm2 = nn.RMSNorm(DIM, eps=1e-6), nn.RMSNorm(DIM, eps=1e-6)
        self.moe = MoE(DIM, 32, EXPERTS, 2)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok_embeddings(ids)
        x = x + self.mix(x.transpose(1, 2))[..., : ids.size(1)].transpose(1, 2)
        x = x + self.moe(self.norm1(x))
        return self.output(self.norm2(x))


def documents(n):
    topic = torch.randint(4, (n,))
    ids = [torch.randint(VOCAB, (n,))]
    for _ in range(LENGTH):
        ids.append(torch.multinomial(topics[topic, ids[-1]], 1).squeeze(1))
    return torch.stack(ids, 1)


class Sharded:
    """All-gathers the parameters in param_dtype and keeps the optimizer in FP32."""

    def __init__(self, model, lr):
        self.model = model.to(param_dtype)
        self.params = list(model.parameters())
        self.master = [p.detach().float().clone().requires_grad_() for p in self.params]
        self.opt = torch.optim.AdamW(self.master, lr=lr, weight_decay=0.0)

    def step(self):
        for m, p in zip(self.master, self.params):
            m.grad, p.grad = p.grad.float(), None
        self.opt.step()
        with torch.no_grad():
            for m, p in zip(self.master, self.params):
                p.copy_(m)


model = Model()
trainer = Sharded(model, lr=1e-2)
gate = model.moe.router.gate
gate.register_forward_pre_hook(lambda module, args: (args[0].to(gate_dtype),))
for step in range(200):
    ids = documents(32)
    logits = model(ids[:, :-1])
    loss = F.cross_entropy(logits.float().reshape(-1, VOCAB), ids[:, 1:].reshape(-1))
    loss.backward()
    trainer.step()
    if step % 5 == 4:
        print(f"step {step} loss {loss.item():.4f}")

with torch.no_grad():
    x = model.tok_embeddings(ids[:, :-1])
    hidden = model.norm1(x + model.mix(x.transpose(1, 2))[..., :LENGTH].transpose(1, 2))
    wide = (hidden.double() @ gate.weight.double().T).sigmoid().topk(2, -1)
    narrow = model.moe.router(hidden)
    moved = (narrow[1].sort(-1)[0] != wide[1].sort(-1)[0]).any(-1).double().mean().item()
