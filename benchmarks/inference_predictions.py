"""Holds predictions for inference against real casts: writes benchmarks/results/inference.md.

Three models are trained for some steps, saved, and run forward under `precdoctor record --inference`: a GPT and a
Llama-like model that generate with a cache, and a CNN. Hooks of their own keep every output, weight, key and value of
the calls that have statistics by group. Each kept tensor is then quantised here, group by group, by code that shares
nothing with the recorder, and compared with what its row of the log predicts.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from predictions import elements

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmarks" / "results" / "inference.md"
MODELS = ("gpt", "llama", "cnn")
#: Calls with statistics by group: powers of two.
KEPT = (0, 16)
FORMATS = ("int8", "int4", "e4m3", "e5m2")
SCALINGS = ("tensor", "token", "channel", "head", "group128")
KINDS = {"weight": "weights", "output": "activations", "kv_key": "cache", "kv_value": "cache"}
#: Above it nothing was lost but digits of the scales, which are FP32.
EXACT_DB = 120.0


# -- the models -------------------------------------------------------------------------------------------------------


def build(name: str):
    """An untrained model; its forward takes tokens and a list of (key, value) per layer, or images."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Attention(nn.Module):
        def __init__(self, width, heads, kv_heads, rotary):
            super().__init__()
            self.heads, self.kv_heads, self.rotary, self.size = heads, kv_heads, rotary, width // heads
            self.q, self.o = nn.Linear(width, width), nn.Linear(width, width)
            self.k, self.v = (nn.Linear(width, kv_heads * self.size) for _ in range(2))

        def turn(self, x, start):
            angles = torch.arange(start, start + x.shape[2])[:, None] * 10000.0 ** (
                -torch.arange(0, self.size, 2) / self.size
            )
            a, b = x.float().chunk(2, -1)
            cos, sin = angles.cos(), angles.sin()
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)

        def forward(self, x, past):
            b, t, width = x.shape
            q, k, v = (
                f(x).view(b, t, n, self.size).transpose(1, 2)
                for f, n in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
            )
            start = 0 if past is None else past[0].shape[2]
            if self.rotary:
                q, k = self.turn(q, start), self.turn(k, start)
            if past is not None:
                k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None, enable_gqa=self.heads > self.kv_heads)
            return self.o(y.transpose(1, 2).reshape(b, t, width)), (k, v)

    class Block(nn.Module):
        def __init__(self, width, heads, kv_heads, rotary):
            super().__init__()
            norm = nn.RMSNorm if rotary else nn.LayerNorm
            self.norm1, self.norm2 = norm(width), norm(width)
            self.attention = Attention(width, heads, kv_heads, rotary)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x, past):
            y, present = self.attention(self.norm1(x), past)
            x = x + y
            return x + self.mlp(self.norm2(x)), present

    class Language(nn.Module):
        def __init__(self, width, heads, kv_heads, layers, rotary):
            super().__init__()
            self.embed, self.place = nn.Embedding(96, width), None if rotary else nn.Embedding(128, width)
            self.blocks = nn.ModuleList(Block(width, heads, kv_heads, rotary) for _ in range(layers))
            self.head = nn.Linear(width, 96)

        def forward(self, tokens, past=None):
            x = self.embed(tokens)
            if self.place is not None:
                start = 0 if past is None else past[0][0].shape[2]
                x = x + self.place(torch.arange(start, start + tokens.shape[1]))
            presents = []
            for i, block in enumerate(self.blocks):
                x, present = block(x, None if past is None else past[i])
                presents.append(present)
            return self.head(x), presents

    torch.manual_seed(0)
    if name == "gpt":
        return Language(128, 4, 4, 3, rotary=False)
    if name == "llama":
        return with_outlier_channels(Language(256, 8, 2, 3, rotary=True))
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.BatchNorm2d(64), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 160), nn.ReLU(), nn.Linear(160, 10)),
    )


def with_outlier_channels(model):
    """A few channels of the keys are large in every Llama (KIVI, arXiv:2402.02750, section 3)."""
    import torch

    with torch.no_grad():
        for block in model.blocks:
            block.attention.k.bias[torch.tensor([5, 21, 40])] = torch.tensor([12.0, -9.0, 15.0])
    return model


def images(generator):
    import torch

    labels = torch.randint(10, (16,), generator=generator)
    return torch.randn(16, 3, 16, 16, generator=generator) + labels[:, None, None, None] / 3.0, labels


def train(name: str, file: Path, steps: int) -> None:
    """Train a model and save it."""
    import torch
    import torch.nn.functional as F

    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        if name == "cnn":
            x, y = images(generator)
            loss = F.cross_entropy(model(x), y)
        else:
            step = torch.randint(1, 5, (8, 1), generator=generator)
            tokens = (torch.randint(96, (8, 1), generator=generator) + torch.arange(49) * step) % 96
            loss = F.cross_entropy(model(tokens[:, :-1])[0].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), file)


def infer(name: str, file: Path, kept: Path) -> None:
    """Run forward, and keep the tensors of some calls."""
    import torch

    model = build(name)
    model.load_state_dict(torch.load(file))
    model.eval().to(torch.bfloat16 if name == "llama" else torch.float32)
    found: dict[str, np.ndarray] = {}
    call = [0]

    def keep(kind, module, leaf, tensor):
        if call[0] in KEPT:
            found[f"{call[0]}|{module}|{kind}|{leaf}"] = tensor.detach().float().numpy().copy()

    for module_name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _m, _a, out, name=module_name: keep("output", name, "", out))
    for parameter_name, parameter in model.named_parameters():
        module_name, _, leaf = parameter_name.rpartition(".")
        keep("weight", module_name, leaf, parameter)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        if name == "cnn":
            for call[0] in range(max(KEPT) + 1):
                model(images(generator)[0])
        else:
            tokens, past = torch.randint(96, (4, 1), generator=generator) + torch.arange(32) * 3, None
            for call[0] in range(max(KEPT) + 1):
                logits, past = model(tokens % 96, past)
                for layer, (key, value) in enumerate(past):
                    keep("kv_key", "", str(layer), key)
                    keep("kv_value", "", str(layer), value)
                tokens = logits[:, -1:].argmax(-1)
    np.savez(kept, **found)


# -- real casts -------------------------------------------------------------------------------------------------------


def groups(x: np.ndarray, kind: str, scaling: str) -> np.ndarray | None:
    """The tensor as a matrix with a group in each row, zeros added where the last one is short; None without groups."""
    cached = kind.startswith("kv_")
    if scaling == "tensor":
        return x.reshape(1, -1)
    if kind == "weight":
        rows = x.reshape(x.shape[0], -1) if x.ndim > 1 else None
        if rows is None or scaling in ("token", "head"):
            return None
        return rows if scaling == "channel" else in_rows(rows)
    if not cached and (x.ndim < 2 or scaling == "head"):
        return None
    tokens = x if cached or x.ndim < 4 else np.moveaxis(x, 1, -1)
    if scaling == "token":
        return tokens.reshape(-1, tokens.shape[-1])
    if scaling == "group128":
        return in_rows(tokens.reshape(-1, tokens.shape[-1]))
    if scaling == "head":
        return np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    if cached:
        return np.transpose(x, (1, 3, 0, 2)).reshape(x.shape[1] * x.shape[3], -1)
    return tokens.reshape(-1, tokens.shape[-1]).T


def in_rows(rows: np.ndarray, size: int = 128) -> np.ndarray:
    padded = np.zeros((rows.shape[0], -(-rows.shape[1] // size) * size))
    padded[:, : rows.shape[1]] = rows
    return padded.reshape(-1, size)


def quantised(rows: np.ndarray, fmt) -> np.ndarray:
    """Each row brought to the format's maximum by its amax, cast, and brought back; scales in FP32, as kernels do."""
    amax = np.abs(rows).max(axis=1, keepdims=True)
    scales = np.where(amax > 0.0, amax / fmt.max, 1.0).astype(np.float32).astype(np.float64)
    if fmt.exponent_bits == 0:
        return np.clip(np.rint(rows / scales), -fmt.max, fmt.max) * scales
    return elements(rows / scales, fmt) * scales


# -- the comparison ---------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of one format and scaling, over the tensors of some kinds."""

    tensors: int = 0
    inside: list[int] = field(default_factory=lambda: [0, 0])
    off: list[float] = field(default_factory=list)
    sqnr: list[float] = field(default_factory=list)


def compare(run: Path, kept: Path) -> Iterator[tuple[tuple[str, str, str], float, float, object]]:
    """Per kept tensor and recipe: what it is, the measured SQNR and flushed share, and the prediction.

    Raises:
        SystemExit: a row is not of the tensor that was kept.
    """
    from precdoctor.diagnosis.offline.whatif.forecast import predicted
    from precdoctor.diagnosis.offline.whatif.keys import TensorKey
    from precdoctor.diagnosis.offline.whatif.recipe import ask
    from precdoctor.numerics.histogram import ExponentHistogram
    from precdoctor.runlog import open_run
    from tests.support.references import cast_blocks, histogram_of

    tensors = np.load(kept)
    recipes = [ask(f, scaling=s) for f in FORMATS for s in SCALINGS] + [ask("nvfp4")]
    met = set()
    for batch in open_run(run).batches("tensors"):
        for row in batch.to_pylist():
            name = f"{row['step']}|{row['module']}|{row['kind']}|{row['name']}"
            if name not in tensors or not row["exp_hist"]:
                continue
            met.add(name)
            x = tensors[name].astype(np.float64)
            if ExponentHistogram.of(row["exp_lo"], row["exp_hist"]) != histogram_of(x):
                raise SystemExit(f"the row of {name} is not of the tensor that was kept")
            key = TensorKey(*(row[name] for name in ("root", "module", "kind", "name", "dtype")))
            for recipe in recipes:
                if recipe.block is not None:
                    cast = cast_blocks(x.reshape(-1, x.shape[-1]), recipe.block, rule=recipe.rule)
                    rows = x.reshape(-1, x.shape[-1])
                    result = elements(cast.quotients, recipe.format) * cast.scales
                else:
                    rows = groups(x, row["kind"], recipe.scaling)
                    if rows is None or (row["kind"] == "weight" and x.ndim < 2):
                        continue
                    result = quantised(rows, recipe.format)
                noise = float(np.square(rows - result).sum())
                sqnr = math.inf if noise == 0.0 else 10.0 * math.log10(float(np.square(rows).sum()) / noise)
                sqnr = sqnr if sqnr < EXACT_DB else math.inf
                flushed = float(((result == 0.0) & (rows != 0.0)).sum()) / max(int((rows != 0.0).sum()), 1)
                scaling = "block16" if recipe.block is not None else recipe.scaling
                yield (recipe.name, scaling, KINDS[row["kind"]]), sqnr, flushed, predicted(row, key, recipe)
    if missing := [n for n in tensors if n not in met and tensors[n].any() and "|output|" not in n]:
        raise SystemExit(f"no row for {missing[0]}")


def count(outcome: Outcome, sqnr: float, flushed: float, prediction) -> None:
    outcome.tensors += 1
    for i, (measured, told) in enumerate(((flushed, prediction.flushed), (sqnr, prediction.sqnr_db))):
        slack = 1e-6 * max(1.0, abs(measured)) if math.isfinite(measured) else 0.0
        outcome.inside[i] += told.low - slack <= measured <= told.high + slack
    if sqnr < EXACT_DB:
        outcome.off.append(abs(sqnr - prediction.sqnr_db.estimate))
        outcome.sqnr.append(sqnr)


TEXT = """# Predictions for inference against real casts

`make predictions` writes this page. {models} models are trained for {steps} steps and run forward under
`precdoctor record --inference`: a GPT (3 blocks, width 128, FP32), a Llama-like model (grouped queries, rotary
positions, outlier channels in its keys, BF16), both generating with a cache, and a CNN (FP32). Weights, outputs of
modules, keys and values of calls {kept} are quantised for real, each group by its own amax with a scale in FP32, and
compared with what the rows of the log predict.

- inside: of how many tensors the measured flushed share and SQNR lie between the ends of the prediction.
- dB off: by how much the point estimate of the SQNR misses the measured one, per tensor; tensors that lose nothing are
  left out.

{table}

Over all {total} predictions the SQNR lies inside in {inside} and the flushed share in {flushed}; the estimate of the
SQNR is off by {median:.2f} dB in the median.

torch {torch}, {machine}.
"""


def page(outcomes: dict[tuple[str, str, str], Outcome], steps: int) -> str:
    """The table, with what stands around it."""
    import platform

    import torch

    rows, total = [], Outcome()
    for (name, scaling, what), o in sorted(outcomes.items(), key=lambda item: list(KINDS.values()).index(item[0][2])):
        off = [f"{np.quantile(o.off, q):.2f}" for q in (0.5, 0.95, 1.0)] if o.off else ["–"] * 3
        measured = f"{np.median(o.sqnr):.1f}" if o.sqnr else "–"
        inside = " / ".join("all" if n == o.tensors else f"{n} of {o.tensors}" for n in o.inside)
        rows.append(f"| {' | '.join(map(str, (what, name, scaling, o.tensors, measured, inside, *off)))} |")
        total.tensors += o.tensors
        total.inside = [a + b for a, b in zip(total.inside, o.inside, strict=True)]
        total.off += o.off
    heads = ["tensors of", "format", "scaling", "tensors", "SQNR, median dB", "inside: flushed / SQNR"]
    heads += ["dB off: median", "95 %", "most"]
    return TEXT.format(
        models="Three", steps=steps, kept=", ".join(map(str, KEPT)), total=f"{total.tensors:,}",
        inside=f"{total.inside[1]:,}", flushed=f"{total.inside[0]:,}", median=float(np.median(total.off)),
        torch=torch.__version__, machine=platform.machine(),
        table="\n".join([f"| {' | '.join(heads)} |", "|---|---|---|---:|---:|---|---:|---:|---:|", *rows]),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--infer", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    args = parser.parse_args()
    if args.infer:
        infer(args.infer[0], Path(args.infer[1]), Path(args.infer[2]))
        return
    outcomes: dict[tuple[str, str, str], Outcome] = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in args.models:
            place = Path(directory) / name
            weights, kept, run = (place.with_suffix(ending) for ending in (".pt", ".npz", ".run"))
            train(name, weights, args.steps)
            script = [sys.executable, __file__, "--infer", name, str(weights), str(kept)]
            record = [sys.executable, "-m", "precdoctor", "record", "--inference", "--every", "1", "-o", str(run), "--"]
            subprocess.run([*record, *script], check=True, cwd=directory)
            for what, sqnr, flushed, prediction in compare(run, kept):
                count(outcomes.setdefault(what, Outcome()), sqnr, flushed, prediction)
    args.output.write_text(page(outcomes, args.steps))
    print(f"Wrote {args.output}")


if __name__ == "__main__":
    main()
