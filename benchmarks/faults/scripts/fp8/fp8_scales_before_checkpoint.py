"""Fine-tunes a pretrained MLP with FP8 linears. The scales of the weights are fixed when the layers are made."""

import torch
import torch.nn as nn
import torch.nn.functional as F

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def to_fp8(x, scale, dtype):
    top = torch.finfo(dtype).max
    return (x * scale).clamp(-top, top).to(dtype).to(x.dtype) / scale


def scale_of(x, dtype):
    return torch.finfo(dtype).max / x.detach().abs().max().clamp(min=1e-12)


class _FP8Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, w_scale):
        x8, w8 = to_fp8(x, scale_of(x, E4M3), E4M3), to_fp8(w, w_scale, E4M3)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g8 = to_fp8(grad, scale_of(grad, E5M2), E5M2)
        return g8 @ w8, g8.t() @ x8, None


class FP8Linear(nn.Linear):
    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("weight_scale", scale_of(self.weight, E4M3), persistent=False)

    def forward(self, x):
        return _FP8Matmul.apply(x, self.weight, self.weight_scale) + self.bias


class Regressor(nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = linear(64, 64), linear(64, 64), linear(64, 64)
        self.out = nn.Linear(64, 1)

    def forward(self, x):
        for layer in (self.fc1, self.fc2, self.fc3):
            x = F.relu(layer(x))
        return self.out(x).squeeze(-1)


def process(n, drift, w):
    x = torch.randn(n, 64)
    return x, torch.sin(x @ w[0]) + 0.5 * (x @ w[1]) * (x @ w[2]) + drift * (x @ w[3])


def fit(model, steps, lr, drift, w, name):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        x, y = process(128, drift, w)
        loss = F.smooth_l1_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 4 == 0 and name == "finetune":
            print(f"{name} step {step} loss {loss.item():.4f}")
    return model


def main():
    torch.manual_seed(7006)
    w = torch.randn(4, 64) / 8
    base = Regressor(nn.Linear)
    for m in base.modules():
        if isinstance(m, nn.Linear):
            nn.init.kaiming_normal_(m.weight)
    checkpoint = fit(base, 60, 2e-3, 0.0, w, "pretrain").state_dict()
    model = Regressor(FP8Linear)
    model.load_state_dict(checkpoint)
    fit(model, 60, 5e-4, 0.5, w, "finetune")


main()
