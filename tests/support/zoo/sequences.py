"""Recurrent and attention models."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.zoo import Trained, fit, specimen


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 16, sparse=True)
        self.lstm = nn.LSTM(16, 20, 2, batch_first=True, dropout=0.1)
        self.cell = nn.LSTMCell(20, 20)
        self.head = nn.Linear(20, 30)

    def forward(self, tokens: Tensor) -> Tensor:
        y, _ = self.lstm(self.embed(tokens))
        state = None
        for t in range(y.shape[1]):
            state = self.cell(y[:, t], state)
        return self.head(state[0])


@specimen
def recurrent() -> Trained:
    torch.manual_seed(0)
    model = Recurrent()

    def loss() -> Tensor:
        return F.cross_entropy(model(torch.randint(0, 30, (4, 18))), torch.randint(0, 30, (4,)))

    return Trained(fit(model, torch.optim.SGD(model.parameters(), lr=0.1), loss), [model])


@specimen
def encoder() -> Trained:
    """The evaluation fast path of TransformerEncoderLayer is another kernel than the training one."""
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(16, 1))
    optimizer, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(3):
        losses += fit(model, optimizer, lambda: model(torch.randn(2, 5, 16)).square().mean(), steps=1)
        model.eval()
        with torch.inference_mode():
            losses.append(model(torch.randn(2, 5, 16)).sum().item())
        model.train()
    return Trained(losses, [model])


class Odd(nn.Module):
    """One module called three times, a dict and a tuple as outputs, views, functional code between modules."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.split, self.norm = nn.Linear(8, 8), Split(), nn.LayerNorm(4)
        self.gate = nn.Linear(4, 1)
        self.split.register_forward_hook(lambda _m, _a, out: {**out, "left": out["left"] * 2})

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        for _ in range(3):
            x = self.shared(x).relu_()
        halves = self.split(x)
        gated = self.norm((halves["left"] * 0.1).exp()) * nn.Sigmoid()(self.gate(halves["right"]))
        return gated, {"aux": x[:, ::2], "none": None}


class Split(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        left, right = x.chunk(2, -1)
        return {"left": left, "right": right}


@specimen
def odd_outputs() -> Trained:
    torch.manual_seed(2)
    model = Odd()

    def loss() -> Tensor:
        main, more = model(torch.randn(6, 8))
        return main.square().mean() + more["aux"].abs().mean()

    return Trained(fit(model, torch.optim.AdamW(model.parameters(), 1e-3), loss), [model])


class Spectral(nn.Module):
    """Frequencies are mixed by complex weights, as in a Fourier neural operator, and turned by a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = nn.Conv1d(1, 4, 1), nn.Conv1d(4, 1, 1)
        self.mix = nn.Parameter(torch.randn(4, 4, 6, dtype=torch.complex64) / 4)
        self.register_buffer("turn", torch.polar(torch.ones(6), torch.arange(6.0)))

    def forward(self, x: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(self.lift(x))
        mixed = torch.einsum("bim,iom->bom", spectrum[..., :6], self.mix) * self.turn
        return self.head(torch.fft.irfft(mixed, n=x.shape[-1]))


@specimen
def spectral() -> Trained:
    torch.manual_seed(8)
    model = Spectral()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return Trained(fit(model, optimizer, lambda: model(torch.randn(4, 1, 16)).square().mean()), [model])
