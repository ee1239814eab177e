"""Stable-Baselines3: SAC swings a pendulum.

library: stable-baselines3
"""

import gymnasium as gym
import torch
from _digest import finish
from stable_baselines3 import SAC

torch.set_num_threads(1)
model = SAC("MlpPolicy", gym.make("Pendulum-v1"), learning_starts=50, batch_size=64, seed=0, device="cpu")
model.learn(total_timesteps=200)
finish([model.logger.name_to_value["train/critic_loss"]], model.policy)
