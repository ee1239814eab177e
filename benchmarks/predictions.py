"""Holds predictions against real casts: `make predictions` writes docs/predictions.md.

A small GPT is trained in BF16 autocast under `precdoctor record`; hooks of its own keep every tensor of two steps. Each
kept tensor is then cast for real, by torch or torchao, and compared with what its row of the log predicts.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "predictions.md"
STEPS, EVERY, WIDTH, LAYERS = 65, 64, 128, 3
#: Above it nothing was lost but digits of float64.
EXACT_DB = 120.0

#: Format, options; as `precdoctor whatif` takes them.
RECIPES = (
    ("fp16", {}),
    ("bf16", {}),
    ("e4m3", {}),
    ("e4m3", {"scale": 1.0}),
    ("e5m2", {}),
    ("mxfp8", {}),
    ("mxfp8", {"rule": "up"}),
    ("mxfp8_e5m2", {}),
    ("mxfp6_e3m2", {}),
    ("mxfp4", {}),
    ("tile128", {}),
    ("nvfp4", {}),
)


# -- the run ----------------------------------------------------------------------------------------------------------


def train(kept: Path, steps: int, every: int, width: int, layers: int) -> None:
    """Train, and keep every output, output gradient and weight of the steps that are sampled."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

        def forward(self, x):
            b, t, _ = x.shape
            q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, 4, -1).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(y.transpose(1, 2).reshape(b, t, width))
            return x + self.mlp(self.norm2(x))

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(96, width), *(Block() for _ in range(layers)), nn.LayerNorm(width), nn.Linear(width, 96)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found: dict[str, np.ndarray] = {}
    step = [0]

    def keep(kind, module, name, tensor):
        if step[0] % every == 0:
            found[f"{step[0]}|{module}|{kind}|{name}"] = tensor.detach().float().numpy().copy()

    def watch(name):
        def hook(_module, _args, output):
            keep("output", name, "", output)
            output.register_hook(lambda grad: keep("grad_output", name, "", grad))

        return hook

    for name, module in model.named_modules():
        if name and not list(module.children()):
            module.register_forward_hook(watch(name))
    for step[0] in range(steps):
        tokens = (torch.randint(96, (8, 1)) + torch.arange(65) * torch.randint(1, 5, (8, 1))) % 96
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            module, _, leaf = name.rpartition(".")
            keep("weight", module, leaf, parameter)
        optimizer.step()
    np.savez(kept, **found)


# -- the comparison ---------------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What came of one recipe, over all tensors."""

    tensors: int = 0
    elements: int = 0
    flushed: list[float] = field(default_factory=lambda: [0.0, 0.0])
    saturated: list[float] = field(default_factory=lambda: [0.0, 0.0])
    inside: list[int] = field(default_factory=lambda: [0, 0, 0])
    off: list[float] = field(default_factory=list)


def compare(run: Path, kept: Path) -> dict[str, Outcome]:
    """Every kept tensor that the log has a row for, under every recipe.

    Raises:
        SystemExit: a row is not of the tensor that was kept.
    """
    from precdoctor.diagnosis.offline.whatif.forecast import predicted
    from precdoctor.diagnosis.offline.whatif.keys import TensorKey
    from precdoctor.diagnosis.offline.whatif.recipe import ask
    from precdoctor.numerics.histogram import ExponentHistogram
    from precdoctor.runlog import open_run
    from tests.support.references import histogram_of

    tensors = np.load(kept)
    outcomes: dict[str, Outcome] = {}
    for batch in open_run(run).batches("tensors"):
        for row in batch.to_pylist():
            key = f"{row['step']}|{row['module']}|{row['kind']}|{row['name']}"
            if key not in tensors or not row["exp_hist"]:
                continue
            x = tensors[key].astype(np.float64)
            if ExponentHistogram.of(row["exp_lo"], row["exp_hist"]) != histogram_of(x):
                raise SystemExit(f"the row of {key} is not of the tensor that was kept")
            tensor = TensorKey(*(row[name] for name in ("root", "module", "kind", "name", "dtype")))
            for name, options in RECIPES:
                recipe = ask(name, **options)
                if recipe.block is not None and row[f"block{recipe.block_size}_hist"] is None:
                    continue
                label = f"{recipe.name}, {recipe.describe()}"
                _count(outcomes.setdefault(label, Outcome()), x, predicted(row, tensor, recipe), recipe)
    return outcomes


def _count(outcome: Outcome, x: np.ndarray, prediction, recipe) -> None:
    used = x[x != 0.0]
    cast, clipped = really_cast(x, prediction, recipe)
    flushed = float(((cast == 0.0) & (x != 0.0)).sum()) / used.size
    saturated = clipped / used.size
    noise = float(np.square(x - cast).sum())
    sqnr = math.inf if noise == 0.0 else 10.0 * math.log10(float(np.square(x).sum()) / noise)
    outcome.tensors += 1
    outcome.elements += used.size
    for sums, measured, told in (
        (outcome.flushed, flushed, prediction.flushed),
        (outcome.saturated, saturated, prediction.saturated),
    ):
        sums[0] += measured * used.size
        sums[1] += told.estimate * used.size
    pairs = ((flushed, prediction.flushed), (saturated, prediction.saturated), (sqnr, prediction.sqnr_db))
    for i, (measured, told) in enumerate(pairs):
        slack = 1e-9 * max(1.0, abs(measured)) if math.isfinite(measured) else 0.0
        outcome.inside[i] += told.low - slack <= measured <= told.high + slack
    both = math.isinf(sqnr) and math.isinf(prediction.sqnr_db.estimate)
    if not both and sqnr < EXACT_DB:
        outcome.off.append(abs(sqnr - prediction.sqnr_db.estimate))


def really_cast(x: np.ndarray, prediction, recipe) -> tuple[np.ndarray, int]:
    """The tensor cast and scaled back, and how many elements left the format's range."""
    from precdoctor.numerics.cells import Limits
    from tests.support.references import cast_blocks

    if recipe.block is None:
        divisors = np.full_like(x, 1.0 / prediction.scale)
        values = elements(x * prediction.scale, recipe.format) * divisors
    elif recipe.block.name in TORCHAO:
        values, divisors = by_torchao(x, recipe)
    else:
        blocks = cast_blocks(x.reshape(-1, x.shape[-1]), recipe.block, rule=recipe.rule)
        divisors = blocks.scales.reshape(x.shape)
        values = elements(blocks.quotients.reshape(x.shape), recipe.format) * divisors
    limits, quotients = Limits.of(recipe.format), np.abs(x / divisors)
    over = quotients >= limits.saturate if limits.tie_overflows else quotients > limits.saturate
    return values, int(over.sum())


#: What torchao calls the element formats whose blocks it casts.
TORCHAO = {
    "MXFP8_E4M3": "float8_e4m3fn",
    "MXFP8_E5M2": "float8_e5m2",
    "MXFP6_E3M2": "fp6_e3m2",
    "MXFP4": "float4_e2m1fn_x2",
    "NVFP4": None,
}


def by_torchao(x: np.ndarray, recipe) -> tuple[np.ndarray, np.ndarray]:
    """The tensor cast by torchao and scaled back, and the scale of each element's block."""
    import torch
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    matrix = torch.from_numpy(x.reshape(-1, x.shape[-1])).float()
    name = TORCHAO[recipe.block.name]
    if name is None:
        cast = NVFP4Tensor.to_nvfp4(matrix, per_tensor_scale=per_tensor_amax_to_scale(matrix.abs().max()))
        scales = cast.get_hp_scales()
    else:
        mode = {"floor": ScaleCalculationMode.FLOOR, "up": ScaleCalculationMode.RCEIL}[recipe.rule.value]
        cast = MXTensor.to_mx(matrix, getattr(torch, name, name), recipe.block_size, mode)
        scales = cast.scale.float()
    spread = scales.repeat_interleave(recipe.block_size, dim=1).double().numpy()
    return cast.dequantize(torch.float32).double().numpy().reshape(x.shape), spread.reshape(x.shape)


def elements(x: np.ndarray, fmt) -> np.ndarray:
    """A saturating cast of every element: by torch where it has the dtype, else by precdoctor's own."""
    import torch

    from precdoctor.numerics.casting_array import cast_array

    dtype = getattr(torch, fmt.dtype, None)
    exact = torch.from_numpy(np.clip(x, -fmt.max, fmt.max))
    if dtype is None or fmt.bits < 8:
        return cast_array(x, fmt, saturate=True)
    # Rounded to FP32 first, as a kernel's multiplication would: twice-rounded ties are told apart by nothing we print.
    return exact.float().to(dtype).double().numpy()


TEXT = """# Predictions against real casts

`make predictions` writes this page. It trains a small GPT ({layers} blocks, width {width}) in BF16 autocast under
`precdoctor record`, keeps every output, output gradient and weight of steps 0 and {every}, casts them for real, and
compares with what the rows of the log predict. FP16, BF16 and FP8 are cast by torch, MX formats and NVFP4 by torchao.
Tiles are cast by precdoctor, whose casts the tests hold against ml_dtypes and gfloat, code by code.

- flushed, saturated: shares of all non-zero elements, measured and predicted.
- inside: of how many tensors the measured flushed share, saturated share and SQNR lie between the ends of the
  prediction.
- exact: tensors that lose nothing, such as norm gains of 1; the decibels leave them out.
- dB off: by how much the point estimate of the SQNR misses the measured one, per tensor.

{table}

A block's amax is known by its binade only, and which elements share a block only in sum: estimates for block formats
are the less certain ones. So are those of tensors that hang on a few elements or take few values. The intervals hold.

torchao gives no NVFP4 block a scale below the smallest normal number of E4M3, 2^-6; predictions go down to its smallest
subnormal one, 2^-9. Where the amax of blocks spreads over more than 2^15 (no tensor here), torchao flushes more than is
predicted: 76 % instead of 74 % of normal numbers with log-normal factors of sigma 3.

Scales per token, channel and head, of weights, activations and caches: [inference](../benchmarks/results/inference.md).

torch {torch}, torchao {torchao}, {machine}.
"""


# -- the page ---------------------------------------------------------------------------------------------------------


def page(outcomes: dict[str, Outcome]) -> str:
    """The table, with what stands around it."""
    import platform
    from importlib.metadata import version

    import torch

    rows = []
    for label, o in outcomes.items():
        name, _, scaling = label.partition(", ")
        flushed, saturated = ([share(v / o.elements) for v in sums] for sums in (o.flushed, o.saturated))
        inside = " / ".join(ratio(n, o.tensors) for n in o.inside)
        off = [f"{np.quantile(o.off, q):.2f}" for q in (0.5, 0.95, 1.0)] if o.off else ["–"] * 3
        cells = [name, scaling, o.tensors, *flushed, *saturated, inside, o.tensors - len(o.off), *off]
        rows.append(f"| {' | '.join(map(str, cells))} |")
    heads = ["format", "scaling", "tensors", "flushed", "predicted", "saturated", "predicted"]
    heads += ["inside: flushed / saturated / SQNR", "exact", "dB off: median", "95 %", "most"]
    return TEXT.format(
        every=EVERY, layers=LAYERS, width=WIDTH, machine=platform.machine(),
        torch=torch.__version__, torchao=version("torchao"),
        table="\n".join([f"| {' | '.join(heads)} |", "|---|---|" + "---:|" * 5 + "---|" + "---:|" * 4, *rows]),
    )  # fmt: skip


def share(value: float) -> str:
    return "0" if value == 0.0 else f"{100 * value:.3g} %"


def ratio(count: int, of: int) -> str:
    return "all" if count == of else f"{count} of {of}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--every", type=int, default=EVERY)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("-o", "--output", type=Path, default=PAGE)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.steps, args.every, args.width, args.layers)
        return
    with tempfile.TemporaryDirectory() as directory:
        run, kept = Path(directory) / "run", Path(directory) / "kept.npz"
        sizes = [f"--{name}={getattr(args, name)}" for name in ("steps", "every", "width", "layers")]
        script = [sys.executable, __file__, "--train", str(kept), *sizes]
        record = [sys.executable, "-m", "precdoctor", "record", "--every", str(args.every), "-o", str(run), "--"]
        subprocess.run([*record, *script], check=True, cwd=directory)
        outcomes = compare(run, kept)
    args.output.write_text(page(outcomes))
    print(f"Wrote {args.output}")


if __name__ == "__main__":
    main()
