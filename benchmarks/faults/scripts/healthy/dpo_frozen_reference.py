"""DPO with label-free preferences: the policy starts as its frozen reference, so that the loss starts at exactly ln 2."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class TinyLM(nn.Module):
    def __init__(self, vocab=20, d=32):
        super().__init__()
        self.embed, self.gru = nn.Embedding(vocab, d), nn.GRU(d, d, batch_first=True)
        self.head = nn.Linear(d, vocab)

    def forward(self, ids):
        return self.head(self.gru(self.embed(ids))[0])


def sequence_logp(model, ids, prompt=3):
    logp = model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
    return logp[:, prompt - 1 :].sum(1)  # of the answer only


def preferences(n):
    prompt = torch.randint(20, (n, 3))
    polite = (prompt[:, :1] + torch.arange(1, 7)) % 20
    rude = (prompt[:, :1] + 2 * torch.arange(1, 7)) % 20
    flip = torch.rand(n, 6) < 0.2
    noise = torch.randint(20, (n, 6))
    chosen, rejected = torch.where(flip, noise, polite), torch.where(flip, noise, rude)
    return torch.cat([prompt, chosen], 1), torch.cat([prompt, rejected], 1)


def main(beta=0.1):
    torch.manual_seed(7023)
    policy = TinyLM()
    reference = copy.deepcopy(policy).eval()
    for p in reference.parameters():
        p.requires_grad_(False)
    optimizer = torch.optim.RMSprop(policy.parameters(), lr=5e-4)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, s / 10))
    for step in range(70):
        chosen, rejected = preferences(32)
        margin = sequence_logp(policy, chosen) - sequence_logp(policy, rejected)
        with torch.no_grad():
            ref_margin = sequence_logp(reference, chosen) - sequence_logp(reference, rejected)
        logits = beta * (margin - ref_margin)
        loss = -F.logsigmoid(logits).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        warmup.step()
        if step % 5 == 0:
            print(f"step {step} loss {loss.item():.4f} reward accuracy {(logits > 0).float().mean().item():.2f}")


main()
