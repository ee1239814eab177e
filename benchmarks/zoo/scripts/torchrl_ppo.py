"""TorchRL: clipped PPO over TensorDicts that a small environment in the script fills.

library: torchrl
"""

import torch
from _digest import finish
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import NormalParamExtractor, ProbabilisticActor, TanhNormal, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

torch.manual_seed(0)
network = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2), NormalParamExtractor())
policy = ProbabilisticActor(
    TensorDictModule(network, in_keys=["observation"], out_keys=["loc", "scale"]),
    in_keys=["loc", "scale"],
    distribution_class=TanhNormal,
    return_log_prob=True,
)
value = ValueOperator(nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1)), in_keys=["observation"])
advantage = GAE(gamma=0.95, lmbda=0.9, value_network=value)
objective = ClipPPOLoss(policy, value, entropy_coeff=1e-3)
optimizer = torch.optim.Adam(objective.parameters(), lr=1e-3)


def collect(steps=32, many=8):
    observation, frames = torch.randn(many, 4), []
    for step in range(steps):
        frame = TensorDict({"observation": observation}, [many])
        with torch.no_grad():
            policy(frame)
        observation = 0.9 * observation + 0.3 * frame["action"] + 0.05 * torch.randn(many, 4)
        done = torch.full((many, 1), step == steps - 1)
        frame["next"] = TensorDict(
            {
                "observation": observation,
                "reward": -observation.square().sum(-1, keepdim=True),
                "done": done,
                "terminated": done,
            },
            [many],
        )
        frames.append(frame)
    return torch.stack(frames, 1)


losses = []
for _ in range(8):
    data = collect()
    with torch.no_grad():
        advantage(data)
    flat = data.reshape(-1)
    for rows in torch.randperm(len(flat)).split(64):
        parts = objective(flat[rows])
        loss = parts["loss_objective"] + parts["loss_critic"] + parts["loss_entropy"]
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
finish(losses, objective)
