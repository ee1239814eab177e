"""Language models: weight tying, keyword-only calls, dataclass outputs, -inf masks, checkpointing, mixed precision."""

from __future__ import annotations

import dataclasses
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.zoo import Trained, fit, specimen
from tests.support.zoo.oracle import Oracle

VOCABULARY, LENGTH, WIDTH = 48, 12, 32


@dataclasses.dataclass
class Output:
    logits: Tensor
    loss: Tensor | None = None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / math.sqrt(WIDTH / 4)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight
        self.reentrant = reentrant

    def forward(self, *, tokens: Tensor, labels: Tensor) -> Output:
        x = self.tokens(tokens) * 0.1 + self.positions
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        logits = self.head(self.norm(x))
        return Output(logits, F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()))


def _loss_of(model: nn.Module):
    def loss() -> Tensor:
        tokens = torch.randint(0, VOCABULARY, (2, LENGTH))
        return model(tokens=tokens, labels=tokens.roll(-1, 1)).loss

    return loss


def _adam(model: nn.Module, lr: float = 1e-3, **more: object) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, **more)


def _plain(reentrant: bool | None) -> Trained:
    torch.manual_seed(0)
    model = GPT(reentrant)
    return Trained(fit(model, _adam(model), _loss_of(model)), [model])


@specimen
def gpt() -> Trained:
    return _plain(None)


@specimen
def gpt_checkpoint() -> Trained:
    return _plain(False)


@specimen
def gpt_checkpoint_reentrant() -> Trained:
    return _plain(True)


@specimen
def gpt_accumulate() -> Trained:
    """Four micro-batches, clipped; the script looks on with hooks of its own."""
    torch.manual_seed(1)
    model, losses = GPT(), []
    optimizer, loss_of, oracle = _adam(model), _loss_of(model), Oracle(model, step=1)
    for _ in range(3):
        for _ in range(4):
            loss = loss_of() / 4
            loss.backward()
            losses.append(loss.item())
        oracle.accumulated()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        oracle.about_to_step()
        optimizer.step()
        oracle.stepped()
        optimizer.zero_grad()
    return Trained(losses, [model])


@specimen
def gpt_bf16_autocast() -> Trained:
    torch.manual_seed(2)
    model = GPT()
    return Trained(fit(model, _adam(model), _loss_of(model), autocast=torch.bfloat16), [model])


@specimen
def gpt_fp16_scaler() -> Trained:
    """The third step overflows on purpose: the scaler skips it and backs off."""
    torch.manual_seed(3)
    model = GPT()
    loss_of, count = _loss_of(model), iter(range(100))

    def loss() -> Tensor:
        return loss_of() * (1e9 if next(count) == 2 else 1.0)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    losses = fit(model, _adam(model), loss, autocast=torch.float16, scaler=scaler, clip=1.0, steps=5)
    return Trained(losses, [model])


@specimen
def gpt_fused_scaler() -> Trained:
    """A fused optimizer takes the loss scale out by itself, and skips by itself."""
    torch.manual_seed(3)
    model = GPT()
    loss_of, count = _loss_of(model), iter(range(100))

    def loss() -> Tensor:
        return loss_of() * (1e9 if next(count) == 1 else 1.0)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return Trained(fit(model, _adam(model, fused=True), loss, autocast=torch.float16, scaler=scaler, steps=3), [model])


class PureBF16(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 128), nn.Linear(128, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).tanh())


@specimen
def pure_bf16() -> Trained:
    """AdamW at 1e-4 on BF16 weights: nearly every update rounds away."""
    torch.manual_seed(4)
    model, losses = PureBF16().bfloat16(), []
    optimizer, oracle = _adam(model, 1e-4), Oracle(model, step=2)
    for _ in range(4):
        loss = F.cross_entropy(model(torch.randn(16, 32).bfloat16()), torch.randint(0, 16, (16,)))
        loss.backward()
        oracle.accumulated()
        oracle.about_to_step()
        optimizer.step()
        oracle.stepped()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def master_weights() -> Trained:
    """The same with FP32 master copies made by hand, which the optimizer is given in place of the weights."""
    torch.manual_seed(4)
    model, losses = PureBF16().bfloat16(), []
    masters = [p.detach().float().clone().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, 1e-4)
    for _ in range(10):
        loss = F.cross_entropy(model(torch.randn(16, 32).bfloat16()), torch.randint(0, 16, (16,)))
        loss.backward()
        for weight, master in zip(model.parameters(), masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for weight, master in zip(model.parameters(), masters, strict=True):
                weight.copy_(master)
        losses.append(loss.item())
    return Trained(losses, [model])


@specimen
def gpt_compiled() -> Trained:
    torch.manual_seed(0)
    model = GPT()
    compiled = torch.compile(model, backend="aot_eager")
    return Trained(fit(model, _adam(model), _loss_of(compiled)), [model])
