"""Policy gradients on an echo task, off-policy demonstrations in every group, sequence-level importance ratios."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

VOCAB, PROMPT, ANSWER = 26, 4, 40


class Policy(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.lm_head = nn.Linear(width, VOCAB)

    def forward(self, tokens, state=None):
        h, state = self.rnn(self.embed(tokens), state)
        return self.lm_head(h), state

    def sequence_logp(self, prompt, answer):
        logits, _ = self(torch.cat([prompt, answer[:, :-1]], 1))
        logp = F.log_softmax(logits[:, PROMPT - 1 :], -1)
        return logp.gather(-1, answer.unsqueeze(-1)).squeeze(-1).sum(-1)

    @torch.no_grad()
    def sample(self, prompt):
        tokens, state, answer = prompt, None, []
        for _ in range(ANSWER):
            logits, state = self(tokens, state)
            p = logits[:, -1].softmax(-1)
            tokens = (p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)  # multinomial without a sync
            answer.append(tokens)
        return torch.cat(answer, 1)


def solve(prompt):
    return prompt[:, -2:].repeat(1, ANSWER // 2)


def reward(prompt, answer):
    return (answer == solve(prompt)).float().mean(-1)


class DemonstrationBuffer:
    """Worked solutions, with their log-probabilities under the policy that training starts from."""

    def __init__(self, policy, size):
        self.prompts = torch.randint(VOCAB, (size, PROMPT))
        self.answers = solve(self.prompts)
        with torch.no_grad():
            self.behaviour = policy.sequence_logp(self.prompts, self.answers)

    def draw(self, n):
        i = torch.randperm(len(self.prompts))[:n]
        return self.prompts[i], self.answers[i], self.behaviour[i]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--group", type=int, default=3)
    parser.add_argument("--ratio-cap", type=float, default=5.0)
    parser.add_argument("--sft-coef", type=float, default=0.05)
    args = parser.parse_args()
    torch.manual_seed(17)
    policy = Policy()
    buffer = DemonstrationBuffer(policy, 64)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for step in range(args.steps):
        prompts, demos, demo_logp = buffer.draw(8)
        repeated = prompts.repeat_interleave(args.group, 0)
        answers = policy.sample(repeated)
        rewards = torch.cat([reward(repeated, answers).view(-1, args.group), reward(prompts, demos)[:, None]], 1)
        advantage = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)

        logp = policy.sequence_logp(repeated, answers).view(-1, args.group)
        logp_demo = policy.sequence_logp(prompts, demos)
        log_ratio = torch.cat([logp - logp.detach(), (logp_demo - demo_logp)[:, None]], 1)
        ratio = torch.exp(log_ratio)
        policy_loss = -(ratio.clamp(max=args.ratio_cap) * advantage).mean()
        loss = policy_loss - args.sft_coef * logp_demo.mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 10 == 0:
            print(f"step {step} loss {loss.item():.3f} reward {rewards[:, :-1].mean():.3f} demo {logp_demo.mean():.1f}")


if __name__ == "__main__":
    main()
