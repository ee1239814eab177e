import torch


class Cells:
    """Phones drive past five masts; the action is the mast to use. The reward is the rate in Gbit/s, less a switch's cost."""

    def __init__(self, phones, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.phones = phones
        self.masts = torch.linspace(0, 1, 5)
        self.reset()

    def reset(self):
        self.at = torch.rand(self.phones, generator=self.g)
        self.speed = 0.04 * torch.randn(self.phones, generator=self.g)
        self.mast = torch.randint(0, 5, (self.phones,), generator=self.g)
        return self.observe()

    def observe(self):
        signal = 1 / (1 + 40 * (self.at[:, None] - self.masts) ** 2)
        signal = signal + 0.05 * torch.randn(self.phones, 5, generator=self.g)
        return torch.cat([signal, torch.nn.functional.one_hot(self.mast, 5), 10 * self.speed[:, None]], 1)

    def step(self, action):
        self.at = (self.at + self.speed).clamp(0, 1)
        self.speed = torch.where((self.at == 0) | (self.at == 1), -self.speed, self.speed)
        quality = 1 / (1 + 40 * (self.at - self.masts[action]) ** 2)
        reward = 0.02 * quality - 0.004 * (action != self.mast).float()
        self.mast = action
        return self.observe(), reward
