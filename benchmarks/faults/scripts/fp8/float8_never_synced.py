"""Float8 linears with delayed scaling, as configured; but the config's enum is compared with a string, so nothing syncs."""

import enum
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


class ScalingType(enum.Enum):
    DELAYED = "delayed"
    DYNAMIC = "dynamic"


@dataclass
class Float8LinearConfig:
    scaling_type_input: ScalingType = ScalingType.DELAYED
    history_len: int = 16


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, module):
        ctx.module = module
        x8 = module.cast("input", x, torch.float8_e4m3fn)
        w8 = module.cast("weight", w, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, w8)
        return x8 @ w8.t()

    @staticmethod
    def backward(ctx, grad):
        x8, w8 = ctx.saved_tensors
        g8 = ctx.module.cast("grad_output", grad, torch.float8_e5m2)
        return g8 @ w8, g8.flatten(0, -2).t() @ x8.flatten(0, -2), None


class Float8Linear(nn.Linear):
    @classmethod
    def from_float(cls, mod, config):
        new = cls(mod.in_features, mod.out_features, bias=False)
        new.weight = mod.weight
        new.config = config
        for name in ("input", "weight", "grad_output"):
            new.register_buffer(f"fp8_amax_history_{name}", torch.zeros(config.history_len))
            new.register_buffer(f"fp8_scale_{name}", torch.ones(()))
        return new

    def cast(self, name, x, dtype):
        history = getattr(self, f"fp8_amax_history_{name}")
        history[0] = torch.maximum(history[0], x.detach().abs().max())
        scale, top = getattr(self, f"fp8_scale_{name}"), torch.finfo(dtype).max
        return (x * scale).clamp(-top, top).to(dtype).to(x.dtype) / scale

    def forward(self, x):
        return _Linear.apply(x, self.weight, self)


def sync_float8_amax_and_scale_history(model):
    for m in model.modules():
        if isinstance(m, Float8Linear):
            for name, dtype in (("input", "e4m3fn"), ("weight", "e4m3fn"), ("grad_output", "e5m2")):
                history = getattr(m, f"fp8_amax_history_{name}")
                top = torch.finfo(getattr(torch, f"float8_{dtype}")).max
                scale = torch.exp2(torch.floor(torch.log2(top / history.max().clamp(min=1e-12))))
                getattr(m, f"fp8_scale_{name}").copy_(scale)
                history.copy_(history.roll(1))
                history[0] = 0


class Float8Handler:
    def __init__(self, config):
        self.config = config
        self.delayed = config.scaling_type_input == "delayed"

    def convert_to_float8_training(self, model):
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear) and name != "output":
                    setattr(parent, name, Float8Linear.from_float(child, self.config))
        return model

    def before_step(self, model):
        if self.delayed:
            sync_float8_amax_and_scale_history(model)


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class NGramLM(nn.Module):
    def __init__(self, vocab=48, dim=48, context=4, layers=3):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim // context)
        self.layers = nn.ModuleDict({str(i): FeedForward(dim, 2 * dim) for i in range(layers)})
        self.norm, self.output = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.trunc_normal_(m.weight, std=0.02)

    def forward(self, context):
        h = self.tok_embeddings(context).flatten(-2)
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


def main():
    torch.manual_seed(607)
    handler = Float8Handler(Float8LinearConfig())
    model = handler.convert_to_float8_training(NGramLM())
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    keys = torch.randint(48, (4,))
    for step in range(1, 141):
        context = torch.randint(48, (1024, 4))
        target = (context[:, 0] + torch.where(context[:, 1] < 24, context[:, 2], keys[context[:, 3] % 4])) % 48
        loss = F.cross_entropy(model(context), target)
        optimizer.zero_grad()
        loss.backward()
        handler.before_step(model)
        optimizer.step()
        if step % 5 == 0:
            print(f"step: {step:2d}  loss: {loss.item():7.4f}")


main()
