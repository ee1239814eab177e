import torch


class MasterAdamW:
    """AdamW over 32-bit copies; the model itself holds bfloat16 weights, refreshed after every step."""

    def __init__(self, model, **options):
        self.weights = [p for p in model.parameters() if p.requires_grad]
        self.masters = [p.detach().float().requires_grad_() for p in self.weights]
        self.inner = torch.optim.AdamW(self.masters, **options)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def step(self, max_norm=1.0):
        for master, weight in zip(self.masters, self.weights):
            master.grad = weight.grad.float()
        torch.nn.utils.clip_grad_norm_(self.masters, max_norm)
        self.inner.step()
        with torch.no_grad():
            for master, weight in zip(self.masters, self.weights):
                weight.copy_(master)
