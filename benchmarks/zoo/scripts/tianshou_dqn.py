"""Tianshou: DQN from a replay buffer, a few updates.

library: tianshou
"""

import gymnasium as gym
import numpy as np
import torch
from _digest import finish
from tianshou.algorithm import DQN
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Batch, ReplayBuffer
from tianshou.utils.net.common import Net
from tianshou.utils.torch_utils import policy_within_training_step, torch_train_mode

torch.manual_seed(0)
np.random.seed(0)
space, actions = gym.spaces.Box(-1, 1, (4,)), gym.spaces.Discrete(3)
network = Net(state_shape=4, action_shape=3, hidden_sizes=[32, 32])
policy = DiscreteQLearningPolicy(model=network, action_space=actions, observation_space=space)
algorithm = DQN(policy=policy, optim=AdamOptimizerFactory(lr=1e-3), gamma=0.95, target_update_freq=20)
buffer = ReplayBuffer(600)
observation = np.random.uniform(-1, 1, 4).astype(np.float32)
for index in range(600):
    action = np.random.randint(3)
    following = np.clip(0.9 * observation + 0.2 * (action - 1), -1, 1).astype(np.float32)
    over = index % 30 == 29
    buffer.add(
        Batch(
            obs=observation,
            act=action,
            rew=-float(np.abs(following).sum()),
            terminated=over,
            truncated=False,
            obs_next=following,
            info={},
        )
    )
    observation = np.random.uniform(-1, 1, 4).astype(np.float32) if over else following
losses = []
with policy_within_training_step(algorithm.policy), torch_train_mode(algorithm.policy):
    for _ in range(80):
        losses.append(algorithm.update(buffer=buffer, sample_size=32).loss)
finish(losses, algorithm)
