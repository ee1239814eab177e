"""Advantage actor-critic on a small lander, FP16 autocast, with two optimizers under one scaler."""

import torch
import torch.nn as nn

torch.manual_seed(6)
ENVS, HORIZON, GAMMA = 24, 4, 0.9


class Lander:
    """Height and speed; an action fires the engine or not. Gravity is raised in the second stage."""

    def __init__(self, gravity):
        self.gravity = gravity
        self.state = torch.rand(ENVS, 2) * torch.tensor([2.0, 1.0])

    def step(self, action):
        height, speed = self.state.unbind(1)
        speed = speed + 0.3 * (action.float() * 2.0 - self.gravity)
        height = (height + 0.3 * speed).clamp(-3, 3)
        reward = -self.gravity * ((height - 1).abs() + 0.1 * speed.abs())
        done = torch.rand(ENVS) < 0.05
        fresh = torch.rand(ENVS, 2) * torch.tensor([2.0, 1.0])
        self.state = torch.where(done[:, None], fresh, torch.stack([height, speed.clamp(-3, 3)], 1))
        return reward, done


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 2))
        self.critic = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, s):
        return self.actor(s).float(), self.critic(s).float().squeeze(-1)


model = ActorCritic()
pi_opt = torch.optim.Adam(model.actor.parameters(), lr=1e-3)
v_opt = torch.optim.SGD(model.critic.parameters(), lr=0.02, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
env = Lander(gravity=0.5)
recent = []

for update in range(400):
    if update == 150:
        env = Lander(gravity=1.2)
    states, actions, rewards, dones = [], [], [], []
    for _ in range(HORIZON):
        with torch.no_grad():
            logits, _ = model(env.state)
        action = torch.distributions.Categorical(logits=logits).sample()
        states.append(env.state)
        reward, done = env.step(action)
        actions.append(action)
        rewards.append(reward)
        dones.append(done.float())
    with torch.autocast("cpu", dtype=torch.float16):
        logits, values = model(torch.stack(states))
        with torch.no_grad():
            target = model(env.state)[1]
    returns = []
    for reward, done in zip(reversed(rewards), reversed(dones)):
        target = reward + GAMMA * (1 - done) * target
        returns.insert(0, target)
    advantage = torch.stack(returns) - values
    log_pi = torch.distributions.Categorical(logits=logits)
    policy = -(log_pi.log_prob(torch.stack(actions)) * advantage.detach()).mean() - 0.01 * log_pi.entropy().mean()
    value = advantage.square().mean()

    pi_opt.zero_grad()
    v_opt.zero_grad()
    scaler.scale(policy + 0.5 * value).backward()
    scaler.unscale_(pi_opt)
    nn.utils.clip_grad_norm_(model.actor.parameters(), 0.5)
    if update >= 150:
        # returns are larger in this stage
        nn.utils.clip_grad_norm_(model.critic.parameters(), 5.0)
    scaler.step(pi_opt)
    scaler.step(v_opt)
    scaler.update()
    recent.append(value.item())
    if update % 10 == 9:
        print(
            f"{update + 1:4d} reward {torch.stack(rewards).mean().item():7.3f} value loss {sum(recent) / len(recent):.4f}"
        )
        recent.clear()
