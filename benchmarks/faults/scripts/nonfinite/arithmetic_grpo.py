"""GRPO on a toy: the policy writes the digits of a+b, eight samples per prompt, reward = share of right digits, less the error."""

import torch
from torch import nn
from torch.distributions import Categorical

torch.manual_seed(2)
GROUP, PROMPTS, CLIP, BETA = 8, 16, 0.2, 0.02


class Policy(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.digit = nn.Embedding(10, width)
        self.slot = nn.Parameter(0.1 * torch.randn(2, width))
        self.body = nn.Sequential(
            nn.Linear(2 * width, 2 * width), nn.GELU(), nn.Linear(2 * width, 2 * width), nn.GELU()
        )
        self.heads = nn.ModuleList(nn.Linear(2 * width, 10) for _ in range(2))

    def forward(self, ab):
        h = (self.digit(ab) + self.slot).flatten(-2)
        h = self.body(h)
        return torch.stack([head(h) for head in self.heads], -2)  # [..., place, digit]


def rewards(ab, answer):
    total = ab.sum(-1)
    truth = torch.stack([total // 10, total % 10], -1)
    wrong = (answer - truth).abs().float() * torch.tensor([1.0, 0.1])
    return (answer == truth).float().mean(-1) - wrong.mean(-1) / 10


def advantages(r):
    mean = r.mean(1, keepdim=True)
    std = r.std(1, keepdim=True)
    return (r - mean) / std


policy, reference = Policy(), Policy()
reference.load_state_dict(policy.state_dict())
reference.requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)


def train():
    for update in range(60):
        ab = torch.randint(10, (PROMPTS, 1, 2)).expand(-1, GROUP, -1)
        with torch.no_grad():
            old = Categorical(logits=policy(ab))
            answer = old.sample()
            old_logp = old.log_prob(answer).sum(-1)
            ref_logp = Categorical(logits=reference(ab)).log_prob(answer).sum(-1)
        r = rewards(ab, answer)
        adv = advantages(r)
        for _ in range(2):
            logp = Categorical(logits=policy(ab)).log_prob(answer).sum(-1)
            ratio = (logp - old_logp).exp()
            surrogate = torch.minimum(ratio * adv, ratio.clamp(1 - CLIP, 1 + CLIP) * adv)
            gap = ref_logp - logp
            kl = gap.exp() - gap - 1
            loss = -(surrogate - BETA * kl).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            if not loss.isfinite():
                print(f"update {update} loss {loss.item()}, stopped")
                return
        if update % 5 == 0:
            print(f"update {update} reward {r.mean().item():.3f} loss {loss.item():.4f}")


train()
