"""The small trainings that the checks record."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import precdoctor
from benchmarks.gpu.place import Place
from benchmarks.models import GPT
from precdoctor.runlog import Run

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@contextlib.contextmanager
def recorded(**options: Any) -> Iterator[Callable[[], Run]]:
    """Record a block strictly; gives what opens the run afterwards."""
    folder = tempfile.mkdtemp(prefix="precdoctor-gpu-")  # below TMPDIR, which goes with the whole run
    with precdoctor.record(f"{folder}/run", strict=True, **options) as recording:
        yield recording.open


def plain_and_recorded(train: Callable[[], str], **options: Any) -> tuple[tuple[str, str], Run]:
    """What a training returns without and with recording, and the run."""
    plain = train()
    with recorded(**options) as run:
        watched = train()
    return (plain, watched), run()


def diagnose(run: Run) -> Any:
    """Every rule on a run."""
    return precdoctor.diagnose(run)


def digest(model: nn.Module) -> str:
    """Of every bit of a model's weights and buffers."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def cnn(place: Place, steps: int) -> None:
    """A convolutional network in channels_last, with BF16 weights and buffers of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.Flatten(),
        nn.LazyLinear(10),
    )  # fmt: skip
    model(torch.randn(2, 3, 16, 16))
    model = model.to(place.device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    images = torch.randn(8, 3, 16, 16, device=place.device).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (8,), device=place.device)
    for _ in range(steps):
        with torch.autocast(place.device.type, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(images).float(), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class Temperature(nn.Module):
    """Divides by the logarithm of a level, which somebody sets below zero."""

    def __init__(self) -> None:
        super().__init__()
        self.level = nn.Parameter(torch.full((), 3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x / self.level.log()  # planted


def planted(place: Place) -> None:
    """A small GPT with a vocabulary of 50 257; `log(-1)` in its forward pass at step 4."""
    torch.manual_seed(0)
    width, layers, batch, length = (512, 4, 8, 256) if place.is_gpu else (16, 1, 2, 16)
    model = GPT(layers, width, 4, length, 50257)
    model.norm = nn.Sequential(model.norm, Temperature())
    model = model.to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    tokens = torch.randint(50257, (batch, length + 1), device=place.device)
    for step in range(6):
        if step == 4:
            with torch.no_grad():
                model.norm[1].level.fill_(-1.0)
        with torch.autocast(place.device.type, dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def captured(place: Place) -> nn.Module:
    """A model trained by replays of a CUDA graph that holds the forward pass, the backward pass and the update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 16)).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, capturable=True)
    x = torch.randn(32, 64, device=place.device)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    return model


class Narrow(torch.autograd.Function):
    """Through E4M3 forwards and through E5M2 backwards, both scaled by their amax."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        scale = 448.0 / x.abs().amax()
        return (x * scale).clamp(-448, 448).to(E4M3).to(x.dtype) / scale

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        scale = 57344.0 / gradient.abs().amax()
        return (gradient * scale).clamp(-57344, 57344).to(E5M2).to(gradient.dtype) / scale


class Narrowed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Narrow.apply(x)


class Product(nn.Module):
    """A linear layer whose forward product is in FP8."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 64) / 8.0)

    def forward(self, x: Tensor) -> Tensor:
        scales = [448.0 / t.detach().abs().amax().float() for t in (x, self.weight)]
        x8, w8 = ((t.detach() * s).to(E4M3) for t, s in zip((x, self.weight), scales, strict=True))
        seen = torch._scaled_mm(x8, w8.t(), *(1.0 / s for s in scales), out_dtype=torch.bfloat16)
        exact = x @ self.weight.t()
        return exact + (seen.float() - exact).detach()


def _fit(place: Place, model: nn.Module, steps: int = 4) -> None:
    torch.manual_seed(1)
    model = model.to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(steps):
        model(torch.randn(32, 64, device=place.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def narrow(place: Place) -> None:
    """Casts to FP8 and back in both passes."""
    _fit(place, nn.Sequential(nn.Linear(64, 128), nn.GELU(), Narrowed(), nn.Linear(128, 16)))


def products(place: Place) -> None:
    """A product in FP8."""
    _fit(place, nn.Sequential(Product(), nn.ReLU(), nn.Linear(32, 1)))


class Mixed(nn.Module):
    """A convolution, attention, dropout, and a part that is recomputed in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(16, 64, 3, padding=1), nn.BatchNorm1d(64)
        self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)
        self.feed = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
        self.head = nn.Linear(64, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x)).transpose(1, 2)
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + checkpoint(self.feed, x, use_reentrant=False)).mean()


def everything(place: Place, dtype: torch.dtype) -> nn.Module:
    """A model trained with deterministic algorithms: autocast, accumulation, clipping; in FP16 scaled, and fused."""
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(0)
    half = dtype == torch.float16
    model = Mixed().to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=half)
    scaler = torch.amp.GradScaler(place.device.type, enabled=half)
    for step in range(12):
        x = torch.randn(8, 16, 32, device=place.device)
        backends = [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        with torch.autocast(place.device.type, dtype=dtype), sdpa_kernel(backends):
            loss = model(x).float().square()
        scaler.scale(loss / 2).backward()
        if step % 2 == 0:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model


def collapsing(place: Place) -> None:
    """FP16 gradients that overflow at any loss scale."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).to(place.device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(place.device.type)
    x = torch.randn(32, 64, device=place.device)
    for _ in range(40):
        with torch.autocast(place.device.type, dtype=torch.float16):
            out = model(x)
        scaler.scale(out.float().sum() * 1e9).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@contextlib.contextmanager
def counted_waits() -> Iterator[list[int]]:
    """Waits for CUDA events in all threads but the recorder's own: their number, and nanoseconds in them."""
    found, wait = [0, 0], torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        if threading.current_thread().name.startswith("precdoctor"):
            wait(event)
            return
        began = time.perf_counter_ns()
        wait(event)
        found[0] += 1
        found[1] += time.perf_counter_ns() - began

    torch.cuda.Event.synchronize = counted
    try:
        yield found
    finally:
        torch.cuda.Event.synchronize = wait


def waits_per_step(place: Place) -> list[int]:
    """Of steps behind the first two."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(8)]).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    x, counts = torch.randn(32, 64, device=place.device), []
    gc.collect()
    for _ in range(10):
        with counted_waits() as found:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        counts.append(found[0])
    return counts[2:]
