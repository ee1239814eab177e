"""The dispatch mode of a deep scan: what it notes of one forward pass, and that it changes nothing."""

from __future__ import annotations

import hashlib
import signal
import sysconfig

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from precdoctor.recording.deepscan.scan_mode import ScanMode
from precdoctor.recording.deepscan.schedule import DEFAULT_SCANS, GRANT_NS, Schedule, offset
from precdoctor.recording.deepscan.window import why_not
from precdoctor.recording.observe.call_frame import has_no_identity
from precdoctor.recording.ops import dispatched_ops
from precdoctor.recording.ops.dispatched_ops import take_off
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.output.evidence import Evidence

MEMORY = 64 << 20


def scan(run, *arguments) -> dict[str, dict]:
    """Facts by kind, and under ``ops`` the coverage, of a function run as the forward of a module."""
    mode = ScanMode(MEMORY, values=True)
    mode.modules.append(("Net#0", "layer"))
    with torch.no_grad(), mode:
        run(*arguments)
    assert mode.failure is None
    facts = {e["data"]["kind"]: {**e["data"], **e} for e in mode.facts()}
    return {**facts, "ops": {o["op"]: o for e in mode.coverage.events() for o in e["data"]["ops"]}}


def kinds(run, *arguments) -> set[str]:
    return scan(run, *arguments).keys() - {"ops"}


def rows(scale: float, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    torch.manual_seed(0)
    return (torch.randn(8, 32) * scale).to(dtype)


# --- an overflow, and what hides it -----------------------------------------------------------------------------------


def rms(x, eps=1e-6):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)


def test_an_overflow_that_rsqrt_hides_is_told_with_what_is_right():
    x = rows(600.0)
    found = scan(rms, x)["overflow"]
    assert (found["op"], found["module"], found["root"]) == ("aten.mul.Tensor", "layer", "Net#0")
    assert found["code"].endswith("(x * x).mean(-1, keepdim=True) + eps)")
    assert (found["wrong"], found["of"], found["seen"]) == (8, 8, 0.0)
    assert found["hidden_by"]["op"] == found["shown_by"]["op"] == "aten.rsqrt.default"
    assert found["exact"] == pytest.approx(float((x.double() ** 2).mean(-1).rsqrt().max()), rel=1e-2)


def test_a_few_rows_among_many_are_told_by_what_they_scale():
    x = rows(1.0) * torch.tensor([1000.0] + [0.01] * 7)[:, None].half()
    found = scan(rms, x)["overflow"]
    assert (found["wrong"], found["of"], found["seen"]) == (32, 256, 0.0)
    assert (found["hidden_by"]["op"], found["shown_by"]["op"]) == ("aten.rsqrt.default", "aten.mul.Tensor")


def test_a_line_of_a_library_is_told_with_the_line_that_led_there_and_one_of_pythons_own_not_at_all():
    def rms_of(file):
        inside = {"torch": torch}
        exec(
            compile("def rms(x):\n    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)", file, "exec"),
            inside,
        )
        return scan(lambda x: inside["rms"](x), rows(600.0))["overflow"]

    library, pythons = rms_of("/opt/site-packages/norms.py"), rms_of(f"{sysconfig.get_path('stdlib')}/statistics.py")
    assert (library["file"], library["line"]) == ("/opt/site-packages/norms.py", 2)
    assert library["caller"] == {"file": pythons["file"], "line": pythons["line"]}
    assert pythons["file"].endswith("test_deepscan.py") and "caller" not in pythons


def test_a_result_that_still_shows_it_hides_nothing():
    def normalise(x):
        norm = (x * x).sum(-1, keepdim=True)
        return norm / norm.mean()

    x = rows(1.0) * torch.tensor([1000.0] + [1.0] * 7)[:, None].half()
    assert not normalise(x).isfinite().all()
    assert kinds(normalise, x) == set()


@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: torch.tanh(x * x),
        lambda x: 1 / (1 + torch.exp(-x)),
        lambda x: (x * x).clamp(max=100.0),
        lambda x: torch.where(x > 10, x, torch.log1p(torch.exp(x))),
        lambda x: torch.where(x == 0, 0.0, 1 / x.where(x > 0, 0.0)),
        lambda x: (x @ x.T).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf).float().softmax(-1),
        lambda x: ((x.float() @ x.float().T) + torch.full((8, 8), -torch.inf).triu(1)).softmax(-1),
        lambda x: torch.full((8, 8), torch.finfo(torch.float32).min).triu(1).half().exp(),
        lambda x: torch.logsumexp(torch.log((x.float() > 0).float()), -1),
        lambda x: torch.nan_to_num(torch.log(x.float())),
        lambda x: torch.exp(-(x * x)),
        lambda x: x.float().masked_fill(x < 0, torch.inf).amin(-1),
        lambda x: torch.topk(x.float().masked_fill(x < 0, -torch.inf), 2).values.clamp_min(0),
        lambda x: F.relu(x) * 3,
        lambda x: F.dropout(x, 0.9),
        lambda x: rms(x.float()),
    ],
)
def test_what_comes_out_right_is_no_fact(harmless):
    assert kinds(harmless, rows(600.0)) == set()
    assert kinds(harmless, rows(30.0)) == set()


def test_an_overflow_for_all_to_see_is_left_to_others():
    assert kinds(lambda x: x * x, rows(600.0)) == set()


def test_nan_to_num_hides_an_overflow_too():
    assert scan(lambda x: torch.nan_to_num(x * x, posinf=0.0) * 0.001, rows(600.0))["overflow"]["seen"] == 0.0


# --- an underflow -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("scales", [(3000.0, 1.0, 2500.0), (1.0, 3000.0), (2200.0, 2200.0)])
def test_a_clipping_norm_beyond_fp16_is_told_whichever_of_its_parts_overflows(scales, foreach):
    def clip(factor=1.0):
        mode, weights = ScanMode(MEMORY, values=True), [torch.nn.Parameter(torch.zeros(32, 32).half()) for _ in scales]
        torch.manual_seed(0)
        for weight, scale in zip(weights, scales, strict=True):
            weight.grad = (torch.randn(32, 32) * scale * factor).half()
        with mode:
            mode.stage = "optimizer"
            torch.nn.utils.clip_grad_norm_(weights, 32768.0, foreach=foreach)
        assert mode.failure is None
        facts = {e["data"]["kind"]: e["data"] for e in mode.facts()}
        return facts, all(not w.grad.any() for w in weights)

    found, cleared = clip()
    assert cleared
    assert (found["overflow"]["wrong"], found["overflow"]["of"], found["overflow"]["seen"]) == (1, 1, 0.0)
    assert clip(1 / 8) == ({}, False)


def test_a_flushed_variance_is_told_by_what_is_made_of_it():
    def normalise(x, eps):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True).float() + eps)

    found = scan(normalise, rows(1e-4), 1e-12)["underflow"]
    assert (found["op"], found["affected"]) == ("aten.mul.Tensor", found["results"][0]["zero"])
    assert found["seen"] == pytest.approx(1e-12, rel=1e-2)
    assert found["exact"] == pytest.approx(1e-8, rel=0.9)
    assert kinds(normalise, rows(1e-4), 1e-6) == set(), "the epsilon is larger"


def test_a_flushed_factor_switches_off_what_it_is_multiplied_with():
    found = scan(lambda x, y: (x * 1e-5).float() * (y * 1e6), rows(1e-4), rows(1.0, torch.float32))["underflow"]
    assert found["seen"] == 0.0
    assert abs(found["exact"]) > 1e-4


def test_the_tail_of_a_running_product_is_told_behind_a_guard_at_the_formats_least_number():
    def survived(hazard, least):
        return torch.cumprod(1 - hazard, 1).clamp(min=least).float().log()

    hazard = torch.full((4, 280), 0.1).half()
    found = scan(survived, hazard, torch.finfo(torch.float16).tiny)["underflow"]
    assert (found["op"], found["seen"]) == ("aten.cumprod.default", pytest.approx(2.0**-14))
    assert found["exact"] < 2.0**-14
    assert found["wrong"] > 200
    assert kinds(survived, hazard, 1e-3) == set(), "a guard of its own"
    assert kinds(survived, hazard[:, :100], torch.finfo(torch.float16).tiny) == set(), "nothing is flushed"


@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: (x.float() @ x.float().T * 50).softmax(-1).half() @ x,
        lambda x: (x * 1e-8) + 1,
        lambda x: F.relu(-x.abs()) * x,
        lambda x: x * torch.zeros_like(x),
        lambda x: torch.exp(-100 * x.abs()).sum(-1, keepdim=True) + x,
    ],
)
def test_zeros_that_do_no_harm_are_no_fact(harmless):
    assert kinds(harmless, rows(1.0)) == set()


# --- sums -------------------------------------------------------------------------------------------------------------


def test_a_running_total_is_held_against_fp64():
    def pool(frames):
        total = torch.zeros(32, dtype=frames.dtype)
        for frame in frames:
            total = total + frame
        return total

    frames = rows(1.0).abs().repeat(128, 1)
    found = scan(pool, frames.bfloat16())["total"]
    assert (found["terms"], found["op"]) == (1024, "aten.add.Tensor")
    off = (pool(frames.bfloat16()).double() - frames.bfloat16().double().sum(0)).norm()
    assert found["error"] == pytest.approx(float(off / frames.bfloat16().double().sum(0).norm()), rel=1e-2)
    assert kinds(pool, frames.float()) == set(), "in FP32 it is as good as right"


def test_totals_in_place_and_residuals():
    def pool(frames):
        total = torch.zeros(32, dtype=frames.dtype)
        for frame in frames:
            total += frame
        return total

    def residual(x):
        for _ in range(64):
            x = x + torch.tanh(x.flip(-1))
        return x

    assert kinds(pool, rows(1.0, torch.bfloat16).abs().repeat(64, 1)) == {"total"}
    assert scan(residual, rows(1.0, torch.bfloat16)).get("total", {"error": 0.0})["error"] < 0.05


def test_only_kernels_that_accumulate_in_half_are_told():
    x = rows(1.0, torch.bfloat16).abs().repeat(512, 1)
    where = torch.zeros(len(x), dtype=torch.long)

    def widened(x):
        return x.sum(0), x.mean(0), x.cumsum(0), x.softmax(0), x.T @ x, torch.zeros_like(x[:1]).index_add(0, where, x)

    def in_half(x):
        return torch.zeros_like(x[:1]).index_put((where,), x, accumulate=True)

    assert kinds(widened, x) == set()
    assert scan(in_half, x)["reduction"]["error"] > 0.5


# --- differences of moments -------------------------------------------------------------------------------------------


def by_moments(x, eps=1e-5):
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x * x).mean(-1, keepdim=True) - mean * mean + eps).abs().sqrt()


def test_cancelling_moments_are_told_with_bits_and_error():
    x = rows(0.3, torch.float32) + 3000
    found = scan(by_moments, x)["cancellation"]
    assert (found["op"], found["used_by"]["op"]) == ("aten.sub.Tensor", "aten.sqrt.default")
    bits = torch.log2(x.double().square().mean(-1) / x.double().var(-1, correction=0)).median()
    assert found["bits_lost"] == pytest.approx(float(bits), abs=0.7)
    assert 2 * found["wrong"] > found["of"]


@pytest.mark.parametrize(
    ("harmless", "level", "spread"),
    [
        (by_moments, 1.0, 0.3),
        (lambda x: by_moments(x, eps=1.0), 300.0, 0.3),
        (lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True), 3000.0, 0.3),
        (lambda x: (x.sum(-1) - (x * 1.0000001).sum(-1)).sigmoid().log(), 3000.0, 0.3),
        (lambda x: F.layer_norm(x, (32,)), 3000.0, 0.3),
        (lambda x: (x - x.clone() + x).sqrt(), 3000.0, 0.3),
    ],
)
def test_other_differences_are_no_fact(harmless, level, spread):
    assert kinds(harmless, rows(spread, torch.float32) + level) == set()


# --- casts ------------------------------------------------------------------------------------------------------------


def test_casts_are_measured_by_the_magnitude_they_lose():
    found = scan(lambda x: x.half(), rows(1e-9, torch.float32))["cast"]
    assert (found["lost"], found["flushed"], found["from"], found["to"]) == (1.0, 256, "float32", "float16")
    assert "effect" not in found, "nothing has read it"
    tail = torch.cat([torch.full((200,), 1e-9), torch.ones(8)])
    assert kinds(lambda x: x.half() + 1, tail) == set(), "they weigh nothing"
    assert kinds(lambda x: x.half(), tail) == set(), "they weigh nothing"
    assert kinds(lambda x: x.bfloat16(), rows(1e-9, torch.float32)) == set()


# --- what an error does to the results it feeds -----------------------------------------------------------------------

F8 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("lossy", "op", "effect"),
    [
        (lambda x: 1.0 / (x.abs().double() * 1e-9).half(), "mul", 1.0),
        (lambda x: (x.float() * 1e-9).half().float() * x.float() * 1e8 + x.float(), "add", 0.1),
        (lambda x: torch.full((8, 8), 2.0**-11).to(F8).float() @ x.float(), "mm", 1.0),
        (lambda x: (torch.full((8, 8), 2.0**-10).to(F8).float() @ x.float()) + x.float(), "add", 2.0**-8),
        (lambda x: (x.float() * 1e-9).half().view(32, 8).t().float() * 1e9, "mul", 1.0),
        (lambda x: (x.float() * 1e-9).half().float() @ (x.float() * 1e-9).half().t().float() * 1e18, "mul", 1.0),
        (lambda x: torch.cat([(x.float() * 1e-9).half().float() * 1e9, x.float()]).unbind()[0] * 2, "mul", 1.0),
    ],
)
def test_a_loss_counts_by_the_result_it_ends_in(lossy, op, effect):
    found = scan(lossy, rows(1.0))["cast"]
    assert found["fed"]["op"].startswith(f"aten.{op}.")
    assert effect / 2 <= found["effect"] <= min(1.0, 2 * effect)


def linear(x, weight, bias):
    return F.linear(x, weight.half(), bias.half())


@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: linear(x, rows(1.0, torch.float32), rows(1e-9, torch.float32)[:, 0]),
        lambda x: linear(x, rows(1e-9, torch.float32), rows(1.0, torch.float32)[:, 0]),
        lambda x: linear(x, rows(1e-9, torch.float32), rows(1e-9, torch.float32)[:, 0]),
        lambda x: x[:, :8] + 4 * linear(x[:, :8], rows(1e-9, torch.float32)[:, :8], rows(1e-9, torch.float32)[:, 0]),
        lambda x: F.conv1d(x.t()[None], rows(1.0)[:, :, None], rows(1e-9, torch.float32)[:, 0].half()),
        lambda x: F.layer_norm(x.float(), (32,)) * (1 + rows(1e-9, torch.float32).half()),
        lambda x: x.float().add_((rows(1e-9, torch.float32)).half()),
        lambda x: (x.float() @ x.float().T + rows(1e-9, torch.float32)[:, :8].half()).softmax(-1),
    ],
)
def test_what_weighs_nothing_in_the_result_is_no_fact(harmless):
    """Zero-initialised biases, heads, adapters and gates after the first step of a warm-up."""
    assert kinds(harmless, rows(1.0)) == set()


def test_an_addition_too_large_to_be_run_again_still_dilutes(monkeypatch):
    monkeypatch.setattr("precdoctor.recording.deepscan.scanned_op.in_fp64", lambda *_, **__: None)
    weight, small = rows(1.0, torch.float32), rows(1e-9, torch.float32)
    assert kinds(lambda x: linear(x, weight, small[:, 0]), rows(1.0)) == set()
    assert "effect" not in scan(lambda x: linear(x, small, weight[:, 0]), rows(1.0))["cast"]


def test_a_hidden_overflow_counts_by_the_result_it_ends_in():
    x = rows(600.0)
    assert scan(rms, x)["overflow"]["effect"] == 1.0
    added = scan(lambda x: x.float() * 100 + rms(x).float(), x)
    assert added.keys() - {"ops"} == set(), "1 beside 60,000"
    assert scan(lambda x: x.float() / 1000 + rms(x).float(), x)["overflow"]["fed"]["op"] == "aten.add.Tensor"


def test_a_total_counts_by_the_result_it_ends_in():
    def pool(frames, others):
        total = torch.zeros(32, dtype=frames.dtype)
        for frame in frames:
            total = total + frame
        return total / len(frames) + others

    frames = rows(1.0).abs().repeat(128, 1).bfloat16()
    found = scan(pool, frames, torch.ones(32))["total"]
    assert (found["terms"], found["fed"]["op"]) == (1024, "aten.add.Tensor")
    assert 0.05 < found["effect"] < found["error"]
    assert kinds(pool, frames, torch.full((32,), 1e6)) == set()


def test_integers_that_collide():
    found = scan(lambda n: n.bfloat16(), torch.arange(1000))["cast"]
    assert (found["distinct_before"], found["distinct_after"], found["largest"]) == (1000, 507, 1000.0)
    assert kinds(lambda: torch.arange(3000, dtype=torch.float16)) == {"cast"}
    assert kinds(lambda n: n.float().bfloat16(), torch.arange(1000)) == {"cast"}
    assert kinds(lambda n: n.half(), torch.arange(2048)) == set()
    assert kinds(lambda x: x.bfloat16(), rows(1000.0, torch.float32)) == set()


def test_features_that_differ_by_less_than_a_format_resolves():
    town = torch.stack([torch.linspace(-122.5, -122.1, 128), torch.rand(128), torch.full((128,), 3.14159)], 1)
    found = scan(lambda x: x.bfloat16(), town)["cast"]
    assert (found["features"], found["features_rounded"], found["feature"]) == (3, 1, 0)
    assert (found["values_before"], found["values_after"]) == (128, 2)
    assert found["spread_lost"] > 0.5 and found["mean"] == pytest.approx(-122.3, abs=0.1)
    image = town.T.reshape(1, 3, 8, 16)
    assert scan(lambda x: x.bfloat16(), image)["cast"]["features_rounded"] == 1, "its channels"
    assert kinds(lambda x: ((x - x.mean(0)) / x.std(0)).bfloat16(), town[:, :2]) == set()
    assert kinds(lambda x: x.bfloat16(), town[:8]) == set(), "too few samples"
    assert kinds(lambda x: x.bfloat16(), town.requires_grad_()) == set(), "no data"


# --- what computes in what --------------------------------------------------------------------------------------------


def test_coverage_names_dtypes_of_forward_and_backward():
    layer = nn.Linear(32, 4)
    x = rows(1.0, torch.float32)
    mode = ScanMode(MEMORY, values=True)
    mode.modules.append(("Net#0", "layer"))
    with torch.autocast("cpu", torch.bfloat16), mode:
        y = layer(x)
    mode.modules.clear()
    with mode:
        y.float().sum().backward()
    assert mode.failure is None
    ops = {(o["op"], o["phase"]): o for e in mode.coverage.events() for o in e["data"]["ops"] if e["module"] == "layer"}
    forward = ops["aten.addmm.default", "forward"]
    assert (forward["inputs"], forward["outputs"], forward["calls"]) == ("bfloat16", "bfloat16", 1)
    assert forward["amax"] == float(y.detach().abs().max())
    assert ("aten.mm.default", "backward") in ops, "backward ops are put down to the module of their forward"
    assert ("aten.t.default", "forward") not in ops, "views compute nothing"


# --- it is not there --------------------------------------------------------------------------------------------------


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 3 * x * x


class Odd(nn.Module):
    """In-place ops, views, a custom function, checkpointing, a batch norm, dropout, complex numbers, sparse rows."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16, sparse=True)
        self.fc, self.norm, self.out = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        self.rnn = nn.GRU(16, 16, batch_first=True)

    def forward(self, tokens):
        x = self.rnn(self.embed(tokens))[0].mean(1)
        x = checkpoint(lambda y: F.dropout(self.fc(y), 0.2), x, use_reentrant=False)
        x = self.norm(x.to(memory_format=torch.contiguous_format))
        x[:, :4] += 1.0
        x.relu_()
        x = x + torch.fft.rfft(x.float()).abs().sum(-1, keepdim=True).to(x.dtype) * 1e-3
        return self.out(Cube.apply(x.view(-1, 4, 4).transpose(1, 2).reshape(-1, 16)))


def train(mode: ScanMode | None, *, half: torch.dtype | None) -> str:
    torch.manual_seed(0)
    model = Odd()
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=half is torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    digest = hashlib.sha256()
    for _ in range(3):
        tokens, labels = torch.randint(0, 20, (8, 5)), torch.randint(0, 3, (8,))
        with torch.autocast("cpu", half or torch.bfloat16, enabled=half is not None):
            if mode is not None:
                mode.modules.append(("Odd#0", ""))
                mode.__enter__()
            scores = model(tokens)
            if mode is not None:
                take_off(mode)
                mode.modules.clear()
            loss = F.cross_entropy(scores.float(), labels)
        if mode is not None:
            mode.__enter__()
        scaler.scale(loss).backward()
        if mode is not None:
            take_off(mode)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        digest.update(repr((loss.item(), torch.rand(1).item())).encode())
    for value in model.state_dict().values():
        digest.update(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
def test_not_a_bit_of_training_changes(half):
    mode = ScanMode(MEMORY, values=True)
    assert train(mode, half=half) == train(None, half=half)
    assert mode.failure is None
    assert mode.ops > 100


def test_a_defect_of_ours_ends_the_looking_and_nothing_else(monkeypatch):
    mode = ScanMode(MEMORY, values=True)
    monkeypatch.setattr(mode.coverage, "note", lambda *_: 1 / 0)
    assert train(mode, half=None) == train(None, half=None)
    assert isinstance(mode.failure, ZeroDivisionError)


def test_what_a_signal_handler_raises_is_the_users(monkeypatch):
    mode = ScanMode(MEMORY, values=True)

    def ring(*_):
        signal.raise_signal(signal.SIGUSR1)

    def handler(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGUSR1, handler)
    monkeypatch.setattr(mode.coverage, "note", ring)
    try:
        with pytest.raises(TimeoutError), mode:
            torch.ones(2) + 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert mode.failure is None


def test_an_error_of_the_op_is_the_users():
    mode = ScanMode(MEMORY, values=True)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), mode:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert mode.failure is None


def test_what_has_no_values_to_read_does_not_end_the_scan():
    def shapes_only(x):
        m = x.to("meta")
        return m.long(), m > 0, m.half().float(), m.argmax(), torch.zeros_like(m, device="cpu")

    assert not kinds(shapes_only, torch.ones(4, 8))


def test_a_mode_left_open_above_ours_stays():
    ours, theirs = ScanMode(MEMORY, values=True), ScanMode(MEMORY, values=True)
    ours.__enter__()
    theirs.__enter__()
    take_off(ours)
    assert torch._C._len_torch_dispatch_stack() == 1
    assert torch._C._get_dispatch_stack_at(0) is theirs
    take_off(theirs)
    assert torch._C._len_torch_dispatch_stack() == 0


def test_where_it_must_not_look():
    assert why_not(nn.Linear(2, 2)) is None
    with ScanMode(MEMORY, values=True):
        assert "another dispatch mode" in str(why_not(nn.Linear(2, 2)))
    assert "compiled" in str(why_not(torch.jit.ScriptModule()))


def test_graphs_made_by_fx_are_modules_and_those_of_export_and_compile_are_not(monkeypatch):
    net, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.ones(1, 2)
    traced = torch.fx.symbolic_trace(net)
    assert why_not(nn.Sequential(traced)) is None and not has_no_identity(traced)
    exported = torch.export.export(net, (x,), strict=False).module()
    assert "compiled" in str(why_not(exported)) and has_no_identity(exported)
    assert has_no_identity(torch.fx.symbolic_trace(nn.ReLU())), "an empty graph, as AOTAutograd makes them"
    monkeypatch.setattr(dispatched_ops, "something_is_compiled", lambda: True)
    assert "compiled" in str(why_not(traced)) and has_no_identity(traced)


def test_data_parallel_is_scanned_unless_it_replicates():
    class Threads(nn.DataParallel):
        pass

    parallel = nn.DataParallel(nn.Linear(2, 2))
    parallel.device_ids = [0]
    assert why_not(parallel) is None
    parallel.device_ids = [0, 1]
    assert "schedules its own" in str(why_not(parallel))
    assert "schedules its own" in str(why_not(Threads(nn.Linear(2, 2))))


# --- what a module repeats --------------------------------------------------------------------------------------------


def repeat(gain: float, times: int = 40):
    def run(x):
        for _ in range(times):
            x = x * gain
        return x

    return run


def test_an_op_that_a_module_repeats_with_ever_larger_results_is_told_by_its_course():
    found = scan(repeat(2.0), torch.ones(8))["repeated"]
    assert (found["module"], found["op"], found["calls"], found["rising"]) == ("layer", "aten.mul.Tensor", 40, 1.0)
    assert len(found["amax"]) == 16
    assert (found["amax"][0], found["amax"][-1]) == (2.0, 2.0**40)


def test_a_recurrence_inside_torchs_own_module_is_told():
    torch.manual_seed(0)
    cell = nn.RNN(4, 16, nonlinearity="relu")
    with torch.no_grad():
        cell.weight_hh_l0.copy_(1.5 * torch.eye(16))
    assert scan(cell, torch.randn(40, 2, 4).abs())["repeated"]["calls"] == 40


def test_a_sum_in_a_loop_is_no_recurrence_that_grows():
    def pool(x):
        total = torch.zeros(8)
        for _ in range(2000):
            total = total + x
        return total

    assert kinds(pool, torch.ones(8)) == set()


@pytest.mark.parametrize("run", [repeat(1.0), repeat(1.1), repeat(0.5), repeat(2.0, times=7)])
def test_repetitions_that_stay_as_large_or_are_few_are_no_fact(run):
    assert kinds(run, torch.ones(8)) == set()


# --- when -------------------------------------------------------------------------------------------------------------


def scanned(options: RecordOptions, steps: int, *, spent: int = 0, per_step: int = 1) -> list[int]:
    schedule = Schedule(options)
    return [
        step
        for step in range(steps)
        if schedule.wants(step, spent_ns=spent * schedule.done, elapsed_ns=per_step * step)
    ]


def test_steps_are_spaced_ever_farther():
    assert scanned(RecordOptions(every=1), 5000) == [0, 1, 8, 64, 512, 4096]
    assert scanned(RecordOptions(every=1, steps=(10, 100)), 5000) == [10, 11, 18, 74]
    assert scanned(RecordOptions(deep_scan=3), 5000) == [0, 1, 8]
    assert scanned(RecordOptions(deep_scan=0), 5000) == []


@given(spent=st.integers(GRANT_NS // 10, 10 * GRANT_NS), budget=st.floats(1e-3, 1.0))
def test_all_but_the_first_two_scans_stay_within_the_budget(spent, budget):
    found = scanned(RecordOptions(budget=budget), 5000, spent=spent, per_step=10**6)
    assert found[:2] == [0, 1]
    for number, step in enumerate(found[2:], 3):
        assert number * spent <= max(budget * step * 10**6, GRANT_NS) * (1 + 1e-9)
        assert step >= offset(number - 1)
    assert len(found) <= DEFAULT_SCANS


def test_scans_that_cost_next_to_nothing_are_made_whatever_the_budget():
    few = RecordOptions(budget=1e-6)
    assert scanned(few, 600, spent=GRANT_NS // 5) == [0, 1, 8, 64, 512]
    assert scanned(few, 600, spent=GRANT_NS // 2) == [0, 1]


def test_discarded_steps_are_looked_into_twice_at_most():
    schedule = Schedule(RecordOptions(deep_scan=1))
    found = []
    for step in range(10):
        if schedule.wants(step, spent_ns=0, elapsed_ns=1):
            found.append(step)
        if step >= 3:
            schedule.arm(Evidence("discarded", step))
    assert found == [0, 4, 6]


def test_scans_of_steps_that_train_nothing_are_made_up_for_twice_at_most():
    schedule, found = Schedule(RecordOptions(budget=1e-6)), []
    for step in range(30):
        if schedule.wants(step, spent_ns=10**9, elapsed_ns=1):
            found.append(step)
        if step % 5 == 4:
            schedule.make_up()
    assert found == [0, 1, 5, 10]


def test_a_new_reason_gets_a_scan_whatever_the_budget_and_the_event_says_why():
    schedule = Schedule(RecordOptions(budget=1e-6))
    found = {}
    for step in range(30):
        if schedule.wants(step, spent_ns=10**9, elapsed_ns=1):
            found[step] = schedule.why
        if step == 20:
            schedule.arm(Evidence("amax", step, 1.0, 300.0, "Net#0/a:output:"))
    assert sorted(found) == [0, 1, 21]
    assert found[0] == {"reason": "first"}
    told = {"what": "amax", "step": 20, "tensor": "Net#0/a:output:", "before": 1.0, "now": 300.0}
    assert found[21] == {"reason": "evidence", "evidence": [told]}


@pytest.mark.parametrize("together", [["discarded", "zeros"], ["zeros", "discarded"]])
def test_evidence_of_one_step_counts_alike_in_every_order(together):
    reasons = ("zeros", "squares", "headroom", "loss", "amax", "discarded")
    armed = {10 * i: [what] for i, what in enumerate(reasons, 1)}
    armed |= {200: together, 300: ["squares"], 310: ["headroom"], 320: ["loss"], 330: ["amax"]}
    schedule, found = Schedule(RecordOptions(deep_scan=1)), []
    for step in range(340):
        if schedule.wants(step, spent_ns=0, elapsed_ns=1):
            found.append(step)
        for what in armed.get(step, ()):
            schedule.arm(Evidence(what, step))
    assert found == [0, 11, 21, 31, 41, 51, 61, 201, 301, 311, 321], "reasons known already get four more scans"


def test_what_one_scan_alone_has_found_is_confirmed_whatever_the_budget_twice_at_most():
    schedule, found = Schedule(RecordOptions(budget=1e-6)), {}
    places = {0: {"a"}, 7: {"a", "b"}, 14: set(), 21: {"c"}}
    for step in range(60):
        if schedule.wants(step, spent_ns=10**9, elapsed_ns=1):
            found[step] = schedule.why
            schedule.found(step, places.get(step, set()))
    assert sorted(found) == [0, 1, 7, 14]
    assert found[7] == {"reason": "evidence", "evidence": [{"what": "fact", "step": 0, "before": None, "now": None}]}


def test_what_two_scans_have_found_needs_no_third():
    schedule, found = Schedule(RecordOptions(budget=1e-6)), []
    for step in range(60):
        if schedule.wants(step, spent_ns=10**9, elapsed_ns=1):
            found.append(step)
            schedule.found(step, {"a"})
    assert found == [0, 1]


def test_a_scanned_step_gives_no_reason_for_another_scan():
    schedule = Schedule(RecordOptions())
    assert schedule.wants(0, spent_ns=0, elapsed_ns=1)
    schedule.arm(Evidence("zeros", 0))
    schedule.wants(1, spent_ns=0, elapsed_ns=1)
    assert schedule.why == {"reason": "first"}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["amax", "zeros", "loss"]), st.integers(0, 500)), max_size=3), st.booleans())
def test_a_noisy_run_is_not_scanned_forever(noise, rich):
    schedule = Schedule(RecordOptions(budget=1.0 if rich else 1e-6))
    found = []
    for step in range(800):
        if schedule.wants(step, spent_ns=10, elapsed_ns=10**9):
            found.append(step)
        for what, tensor in noise or [("amax", step)]:
            schedule.arm(Evidence(what, step, tensor=f"Net#0/{tensor + step}:output:"))
    assert len(found) <= DEFAULT_SCANS + 3 + 4
    assert len(schedule._waiting) <= 8
