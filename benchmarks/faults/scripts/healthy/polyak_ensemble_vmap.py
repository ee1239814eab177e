"""Five small regressors at once by torch.func, each with a slow FP32 average of its weights."""

import torch
from torch.func import grad_and_value, vmap

torch.manual_seed(33)
MEMBERS, HIDDEN = 5, 32

params = {
    "w1": torch.randn(MEMBERS, 3, HIDDEN) / 3**0.5,
    "b1": torch.zeros(MEMBERS, HIDDEN),
    "w2": torch.randn(MEMBERS, HIDDEN, HIDDEN) / HIDDEN**0.5,
    "b2": torch.zeros(MEMBERS, HIDDEN),
    "w3": torch.randn(MEMBERS, HIDDEN, 1) / HIDDEN**0.5,
}
for p in params.values():
    p.requires_grad_()


def predict(p, x):
    h = torch.nn.functional.silu(x @ p["w1"] + p["b1"])
    h = torch.nn.functional.silu(h @ p["w2"] + p["b2"])
    return (h @ p["w3"]).squeeze(-1)


def objective(p, x, y):
    return (predict(p, x) - y).square().mean()


step_fn = vmap(grad_and_value(objective), in_dims=(0, None, None))
average = {k: v.detach().clone() for k, v in params.items()}
optimizer = torch.optim.Adam(params.values(), lr=5e-3)
for step in range(200):
    x = 4 * torch.rand(64, 3) - 2
    y = torch.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2]
    grads, losses = step_fn({k: v.detach() for k, v in params.items()}, x, y)
    for k, p in params.items():
        p.grad = grads[k]
    optimizer.step()
    with torch.no_grad():
        for k, p in params.items():
            average[k].lerp_(p, 1e-4)
    if step % 4 == 3:
        print(f"step {step} loss {losses.mean().item():.4f}")
