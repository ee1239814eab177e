"""Stable-Baselines3: DQN balances a pole.

library: stable-baselines3
"""

import gymnasium as gym
import torch
from _digest import finish
from stable_baselines3 import DQN

torch.set_num_threads(1)
model = DQN(
    "MlpPolicy",
    gym.make("CartPole-v1"),
    learning_starts=100,
    train_freq=4,
    target_update_interval=200,
    seed=0,
    device="cpu",
)
model.learn(total_timesteps=900)
finish([model.logger.name_to_value.get("train/loss", 0.0)], model.policy)
