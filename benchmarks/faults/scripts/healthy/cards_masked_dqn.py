"""Double DQN for a card game: illegal cards are -inf, finished games have no legal card at all, and where takes care of it."""

import argparse
import math
from collections import deque

import torch
import torch.nn as nn
import torch.nn.functional as F

CARDS = 8


class QNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * CARDS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.value, self.advantage = nn.Linear(width, 1), nn.Linear(width, CARDS)

    def forward(self, state):
        h = self.body(state)
        advantage = self.advantage(h)
        return self.value(h) + advantage - advantage.mean(-1, keepdim=True)


class Game:
    """Play the hand from the lowest card up; a card out of order costs a point."""

    def reset(self):
        self.hand = torch.rand(CARDS) < 0.5
        self.hand[int(torch.randint(CARDS, ()))] = True
        self.played = torch.zeros(CARDS)
        return self.state(), self.hand.clone()

    def state(self):
        return torch.cat([self.hand.float(), self.played])

    def step(self, card):
        lowest = int(self.hand.nonzero()[0])
        self.hand[card] = False
        self.played[card] = 1.0
        return self.state(), self.hand.clone(), 1.0 if card == lowest else -1.0, not bool(self.hand.any())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--gamma", type=float, default=0.95)
    args = parser.parse_args()
    torch.manual_seed(106)
    online, target = QNet(), QNet()
    target.load_state_dict(online.state_dict())
    optimizer = torch.optim.Adam(online.parameters(), lr=2e-3)
    memory, game = deque(maxlen=400), Game()
    state, legal = game.reset()
    best = -math.inf
    for t in range(args.steps):
        with torch.no_grad():
            q = online(state).masked_fill(~legal, -math.inf)
            noise = torch.full((CARDS,), -math.inf).masked_fill(legal, 0.0).softmax(-1)
            card = int(torch.multinomial(noise, 1)) if torch.rand(()) < 0.3 else int(q.argmax())
        following, its_legal, reward, done = game.step(card)
        memory.append((state, torch.tensor(card), torch.tensor(reward), following, its_legal, torch.tensor(done)))
        state, legal = game.reset() if done else (following, its_legal)
        if t < 60 or t % 3:
            continue
        picks = torch.randint(len(memory), (24,)).tolist()
        s, a, r, s2, legal2, over = (torch.stack(column) for column in zip(*(memory[i] for i in picks)))
        with torch.no_grad():
            choice = online(s2).masked_fill(~legal2, -math.inf).argmax(-1, keepdim=True)
            future = target(s2).masked_fill(~legal2, -math.inf).gather(1, choice).squeeze(1)  # -inf when it is over
            goal = r + torch.where(over, torch.zeros_like(future), args.gamma * future)
        loss = F.smooth_l1_loss(online(s).gather(1, a.unsqueeze(1)).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(online.parameters(), 1.0)
        optimizer.step()
        if t % 12 == 0:
            target.load_state_dict(online.state_dict())
            best = max(best, goal.mean().item())
            print(f"t {t} loss {loss.item():.4f} best goal {best:.3f}")


if __name__ == "__main__":
    main()
