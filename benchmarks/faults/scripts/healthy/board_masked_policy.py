"""Policy gradient for a small placement game: occupied cells get a logit of minus infinity."""

import torch
from torch import nn

CELLS = 16


class Policy(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * CELLS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.cells = nn.Linear(width, CELLS)

    def forward(self, values, taken):
        logits = self.cells(self.net(torch.cat([values, taken.float()], -1)))
        return logits.masked_fill(taken, -torch.inf).log_softmax(-1)


def entropy(log_prob):
    """Forbidden cells have probability zero and add nothing."""
    allowed = log_prob > -torch.inf
    safe = torch.where(allowed, log_prob, 0.0)
    return -(torch.where(allowed, safe.exp(), 0.0) * safe).sum(-1)


def play(policy, games, generator, rounds=5):
    """Pick free cells one after another; each pays its value, less for a neighbour that is taken."""
    values = torch.randn(games, CELLS, generator=generator)
    taken = torch.rand(games, CELLS, generator=generator) < 0.3
    taken[:, 0] = False
    taken[:, 5:10] = False
    log_probs, entropies, rewards = [], [], []
    for _ in range(rounds):
        log_prob = policy(values, taken)
        action = torch.multinomial(log_prob.detach().exp(), 1, generator=generator)
        neighbour = taken.gather(1, (action + 1) % CELLS).float()
        rewards.append((values.gather(1, action) - 0.5 * neighbour).squeeze(1))
        log_probs.append(log_prob.gather(1, action).squeeze(1))
        entropies.append(entropy(log_prob))
        taken = taken.scatter(1, action, True)
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(log_probs), torch.stack(entropies), returns


def train(updates=60, games=64):
    torch.manual_seed(141)
    generator = torch.Generator().manual_seed(142)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for update in range(updates):
        log_prob, spread, returns = play(policy, games, generator)
        advantage = (returns - returns.mean(1, keepdim=True)) / (returns.std(1, keepdim=True) + 1e-6)
        loss = -(advantage * log_prob).mean() - 0.01 * spread.mean()
        if not torch.isfinite(loss):
            print(f"update {update}: loss {loss.item()}, stopping")
            return
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0, error_if_nonfinite=True)
        optimizer.step()
        if update % 10 == 0:
            print(f"update {update} loss {loss.item():.4f} return {returns[0].mean():.3f}")


train()
