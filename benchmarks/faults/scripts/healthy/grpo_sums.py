"""GRPO on a toy of sums: groups of answers, a verifiable reward of 0 or 1, a clipped ratio and a KL to the frozen start."""

import copy

import torch
import torch.nn as nn
import torch.nn.functional as F


class Policy(nn.Module):
    def __init__(self, digits=6, d=24):
        super().__init__()
        self.a, self.b = nn.Embedding(digits, d), nn.Embedding(digits, d)
        self.mlp = nn.Sequential(nn.Linear(2 * d, 64), nn.GELU(), nn.Linear(64, 2 * digits - 1))

    def forward(self, prompt):
        return self.mlp(torch.cat([self.a(prompt[:, 0]), self.b(prompt[:, 1])], 1)).log_softmax(-1)


def sample(logp, group):
    noise = -torch.log(-torch.log(torch.rand(len(logp), group, logp.shape[1]).clamp(1e-9, 1 - 1e-6)))
    return (logp.unsqueeze(1) + noise).argmax(-1)


def main(group=32, clip=0.2, beta=0.01):
    torch.manual_seed(7022)
    policy = Policy()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    questions = torch.cartesian_prod(torch.arange(6), torch.arange(6))
    for it in range(75):
        prompt = questions[torch.randperm(36)[:30]]
        with torch.no_grad():
            old = policy(prompt)
            answers = sample(old, group)
            reward = (answers == prompt.sum(1, keepdim=True)).to(old.dtype)
            # all right or all wrong: no advantage, no gradient
            advantage = (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)
            old_chosen, ref_chosen = old.gather(1, answers), reference(prompt).gather(1, answers)
        for _ in range(2):
            chosen = policy(prompt).gather(1, answers)
            ratio = (chosen - old_chosen).exp()
            objective = torch.min(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
            kl = (ref_chosen - chosen).exp() - (ref_chosen - chosen) - 1
            surrogate = -(objective - beta * kl).mean()
            optimizer.zero_grad()
            surrogate.backward()
            nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
        if it % 5 == 0:
            with torch.no_grad():
                nll = F.nll_loss(policy(questions), questions.sum(1)).item()
            print(f"it {it} reward {reward.mean().item():.3f} surrogate {surrogate.item():+.4f} eval loss {nll:.4f}")


main()
