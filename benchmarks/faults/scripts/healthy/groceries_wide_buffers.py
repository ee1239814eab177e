"""Many micro-batches with a BF16 model: every micro-gradient is added to an FP32 buffer at once."""

import torch
import torch.nn as nn
import torch.nn.functional as F

ITEMS, MICRO = 100, 48


class BasketModel(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.items, self.hidden, self.next = nn.Embedding(ITEMS, dim), nn.Linear(dim, dim), nn.Linear(dim, ITEMS)

    def forward(self, basket):
        h = self.items(basket).mean(1)
        return self.next(h + F.relu(self.hidden(h)))


class MainGradients:
    """FP32 weights and gradients beside the BF16 ones, as Megatron keeps them."""

    def __init__(self, model, lr):
        self.low = list(model.parameters())
        self.main = [nn.Parameter(p.detach().float()) for p in self.low]
        self.optimizer = torch.optim.Adam(self.main, lr=lr)
        for p, main in zip(self.low, self.main):
            main.grad = torch.zeros_like(main)
            p.register_post_accumulate_grad_hook(self.gather(main))

    def gather(self, main):
        def hook(p):
            main.grad.add_(p.grad)
            p.grad = None

        return hook

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)
        for p, main in zip(self.low, self.main):
            p.copy_(main)


torch.manual_seed(317)
missions = torch.distributions.Dirichlet(torch.full((8, ITEMS), 0.06)).sample()
model = BasketModel().to(torch.bfloat16)
trainer = MainGradients(model, lr=2e-2)
for step in range(24):
    total = 0.0
    for _ in range(MICRO):
        items = torch.multinomial(missions[torch.randint(8, (8,))], 6, replacement=True)
        loss = F.cross_entropy(model(items[:, :5]).float(), items[:, 5]) / MICRO
        loss.backward()
        total += loss.item()
    trainer.step()
    print(f"step {step} loss {total:.4f}")
