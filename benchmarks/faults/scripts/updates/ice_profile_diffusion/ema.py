import copy

import torch


class ModelEma:
    """A slow copy of the weights, for sampling. Kept in a format of its own, as it only has to be read."""

    def __init__(self, model, decay=0.995, dtype=None):
        self.module = copy.deepcopy(model).requires_grad_(False).eval()
        if dtype is not None:
            self.module.to(dtype)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for slow, fast in zip(self.module.parameters(), model.parameters()):
            slow.lerp_(fast.to(slow.dtype), 1 - self.decay)

    def state_dict(self):
        return {"decay": self.decay, "module": self.module.state_dict()}
