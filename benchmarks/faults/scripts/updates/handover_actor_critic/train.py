"""Advantage actor-critic for handovers between masts; optimizer settings as in our Atari runs."""

import argparse

import torch
from agent import Agent, advantages
from env import Cells


def rollout(agent, env, observation, length):
    rows = []
    for _ in range(length):
        with torch.no_grad():
            policy, _ = agent(observation)
            action = policy.sample()
        following, reward = env.step(action)
        rows.append((observation, action, reward))
        observation = following
    return [torch.stack(column) for column in zip(*rows)], observation


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--phones", type=int, default=32)
    parser.add_argument("--horizon", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--adam-eps", type=float, default=1e-2)
    parser.add_argument("--entropy", type=float, default=2e-4)
    return parser.parse_args()


if __name__ == "__main__":
    args = parse()
    torch.manual_seed(21)
    env, agent = Cells(args.phones, seed=22), Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=args.adam_eps)
    observation = env.reset()
    recent = []
    for update in range(args.updates):
        (seen, actions, rewards), observation = rollout(agent, env, observation, args.horizon)
        policy, values = agent(seen)
        with torch.no_grad():
            advantage = advantages(rewards, values, agent(observation)[1])
        actor = -(policy.log_prob(actions) * advantage).mean()
        critic = (advantage + values.detach() - values).square().mean()
        optimizer.zero_grad()
        (actor + 0.5 * critic - args.entropy * policy.entropy().mean()).backward()
        torch.nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        recent.append(rewards.mean().item())
        if update % 10 == 9:
            print(
                f"update {update} rate {1e3 * sum(recent[-10:]) / 10:.2f} Mbit/s, loss {1 - 50 * sum(recent[-10:]) / 10:.4f}"
            )
