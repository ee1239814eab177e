"""Stable-Baselines3: PPO balances a pole.

library: stable-baselines3
"""

import gymnasium as gym
import torch
from _digest import finish
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

torch.set_num_threads(1)


class Losses(BaseCallback):
    values = []

    def _on_step(self):
        return True

    def _on_rollout_start(self):
        if "train/loss" in self.logger.name_to_value:
            self.values.append(self.logger.name_to_value["train/loss"])


model = PPO("MlpPolicy", gym.make("CartPole-v1"), n_steps=128, batch_size=32, n_epochs=4, seed=0, device="cpu")
model.learn(total_timesteps=1024, callback=Losses())
finish(Losses.values, model.policy)
