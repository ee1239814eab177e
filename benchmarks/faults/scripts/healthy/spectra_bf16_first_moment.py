"""Adam with the first moment in BF16 and the second in FP32, as in recent memory-lean recipes; weights in FP32."""

import torch
import torch.nn.functional as F
from torch import nn

torch.manual_seed(616)


class LeanAdam(torch.optim.Optimizer):
    def __init__(self, params, lr, betas=(0.9, 0.99), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                s = self.state[p]
                if not s:
                    s["step"], s["exp_avg"], s["exp_avg_sq"] = (
                        0,
                        torch.zeros_like(p, dtype=torch.bfloat16),
                        torch.zeros_like(p),
                    )
                s["step"] += 1
                m = s["exp_avg"].to(p.dtype).lerp(p.grad, 1 - b1)
                s["exp_avg"].copy_(m)
                s["exp_avg_sq"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                v_hat = s["exp_avg_sq"] / (1 - b2 ** s["step"])
                p.sub_(group["lr"] / (1 - b1 ** s["step"]) * m / (v_hat.sqrt() + group["eps"]))


class SpectrumNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(1, 12, 7, stride=2), nn.Conv1d(12, 24, 5, stride=2)
        self.fc = nn.Linear(24, 6)

    def forward(self, x):
        return self.fc(F.relu(self.conv2(F.relu(self.conv1(x)))).amax(-1))


net, lines = SpectrumNet(), torch.randn(6, 1, 64)
optimizer = LeanAdam(net.parameters(), lr=3e-3)
for step in range(200):
    y = torch.randint(6, (32,))
    loss = F.cross_entropy(net(lines[y] + 0.5 * torch.randn(32, 1, 64)), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 9:
        print(f"step {step + 1} loss {loss.item():.4f}")
