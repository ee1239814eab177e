"""DQN on a drifting cart; no target network, and the return is bootstrapped past the end of an episode."""

import random
from collections import deque
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.optim as optim

GAMMA, BATCH_SIZE = 0.99, 64


class Transition(NamedTuple):
    state: torch.Tensor
    action: int
    reward: float
    next_state: torch.Tensor
    done: bool


class Cart:
    """Position, speed, angle and its speed, none of them scaled; the episode ends when the pole has fallen."""

    def __init__(self, rng):
        self.rng = rng

    def reset(self):
        self.s = [self.rng.uniform(-0.5, 0.5) for _ in range(4)]
        return torch.tensor(self.s)

    def step(self, action):
        x, v, a, w = self.s
        push = 1.0 if action == 1 else -1.0
        v += 0.3 * push
        w += 0.4 * a - 0.3 * push
        self.s = [x + 0.3 * v, v, a + 0.3 * w, w]
        done = abs(self.s[0]) > 20 or abs(self.s[2]) > 10
        return torch.tensor(self.s), 1.0, done


class ReplayMemory:
    def __init__(self, capacity):
        self.memory = deque([], maxlen=capacity)

    def push(self, *args):
        self.memory.append(Transition(*args))

    def __len__(self):
        return len(self.memory)

    def sample(self, n, rng):
        return Transition(*zip(*rng.sample(self.memory, n)))


class DQN(nn.Module):
    def __init__(self, n_observations=4, n_actions=2):
        super().__init__()
        self.layer1 = nn.Linear(n_observations, 64)
        self.layer2 = nn.Linear(64, 64)
        self.layer3 = nn.Linear(64, n_actions)

    def forward(self, x):
        x = torch.relu(self.layer1(x))
        x = torch.relu(self.layer2(x))
        return self.layer3(x)


def optimize_model():
    batch = memory.sample(BATCH_SIZE, rng)
    state, next_state = torch.stack(batch.state), torch.stack(batch.next_state)
    action, reward = torch.tensor(batch.action).view(-1, 1), torch.tensor(batch.reward)
    done = torch.tensor(batch.done, dtype=reward.dtype)
    q = policy_net(state).gather(1, action).squeeze(1)
    with torch.no_grad():
        next_q = policy_net(next_state).max(1).values
    target = reward + GAMMA * next_q
    loss = nn.functional.mse_loss(q, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item(), q.mean().item(), int(done.sum())


torch.manual_seed(514)
rng = random.Random(514)
env, memory = Cart(rng), ReplayMemory(5000)
policy_net = DQN()
optimizer = optim.Adam(policy_net.parameters(), lr=1e-3)
state, steps_done = env.reset(), 0
while steps_done < 300 + BATCH_SIZE:
    eps = max(0.1, 1 - steps_done / 200)
    with torch.no_grad():
        action = rng.randrange(2) if rng.random() < eps else int(policy_net(state).argmax())
    next_state, reward, done = env.step(action)
    memory.push(state, action, reward, next_state, done)
    state = env.reset() if done else next_state
    steps_done += 1
    if len(memory) > BATCH_SIZE:
        td, q_mean, ends = optimize_model()
        if steps_done % 6 == 0:
            print(f"TD loss: {td:.4f}  mean Q {q_mean:.2f}  ends in batch {ends}")
