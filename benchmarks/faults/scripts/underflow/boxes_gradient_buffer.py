"""Box regression with accumulated gradients; the accumulator lives in half precision to save memory."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class GradientBuffer:
    """Moves each micro-batch's gradient out of ``.grad`` as soon as autograd has written it."""

    def __init__(self, model, micro_batches, dtype=torch.float16):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.n = micro_batches
        self.buffers = [torch.zeros_like(p, dtype=dtype) for p in self.params]
        for p, b in zip(self.params, self.buffers):
            p.register_post_accumulate_grad_hook(self._hook(b))

    def _hook(self, buffer):
        def move(p):
            buffer.add_((p.grad / self.n).to(buffer.dtype))
            p.grad = None

        return move

    def release(self):
        for p, b in zip(self.params, self.buffers):
            p.grad = b.clone().to(p.dtype)
            b.zero_()


class BoxHead(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.box = nn.Linear(width, 4)

    def forward(self, x):
        return self.box(self.backbone(x))


torch.manual_seed(404)
true = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).requires_grad_(False)
model = BoxHead()
MICRO = 8
buffer = GradientBuffer(model, MICRO)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-15)
for step in range(90):
    total = 0.0
    for _ in range(MICRO):
        x = torch.randn(16, 32)
        boxes = 0.02 * true(x)
        loss = 1e-3 * F.mse_loss(model(x), boxes)
        loss.backward()
        total += loss.item() / MICRO
    buffer.release()
    optimizer.step()
    optimizer.zero_grad()
    if step % 5 == 0:
        print(f"step {step:3d} loss {total * 1e6:.4f} (x 1e-6)")
