"""The scan's window from one step end to the next, and what it measures of states, gradients and loss code."""

from __future__ import annotations

import json

import pytest
import torch
import torch.nn.functional as F

import precdoctor
from precdoctor.recording.deepscan.scan_mode import ScanMode
from tests.support.processes import record, script, warm

HALF = (torch.float16, torch.bfloat16)


def facts(run, *arguments, stage: str = "script") -> dict[str, dict]:
    """Facts by kind of a function that runs outside of modules."""
    mode = ScanMode(64 << 20, values=True)
    mode.stage = stage
    with mode:
        kept = run(*arguments)
    assert mode.failure is None
    found = {e["data"]["kind"]: {**e["data"], **e} for e in mode.facts()}
    del kept
    return found


def ones(dtype=torch.bfloat16) -> torch.Tensor:
    return torch.ones(64, dtype=dtype)


def rounded(x):
    x.copy_((x.float() * 0.9999 + 0.00005).bfloat16())


def foreach(x):
    torch._foreach_lerp_([x], [torch.zeros(64, dtype=x.dtype)], 1e-4)


STALLING = {
    "decay": lambda x: x.mul_(0.9999),
    "average": lambda x: x.lerp_(torch.zeros(64, dtype=x.dtype), 1e-4),
    "sum": lambda x: x.add_(torch.ones(64, dtype=x.dtype), alpha=1e-4),
    "square": lambda x: x.addcmul_(x, x, value=1e-4),
    "foreach": foreach,
    "rounded": rounded,
}


@pytest.mark.parametrize("change", STALLING.values(), ids=STALLING)
def test_a_state_that_stays_is_measured_whatever_writes_to_it(change):
    found = facts(change, ones())["stalled"]
    assert (found["moved"], found["stalled"], found["dtype"], found["target"]) == (64, 64, "bfloat16", "state")
    assert found["bits_missing"] > 3


def test_a_narrow_copy_of_a_wide_state_is_none_that_stays():
    average, served, weight = torch.randn(64), torch.empty(64, dtype=torch.bfloat16), torch.randn(64)
    served.copy_(average)

    def serve():
        average.lerp_(weight, 1e-4)
        served.copy_(average)

    assert "stalled" not in facts(serve)


@pytest.mark.parametrize("change", STALLING.values(), ids=STALLING)
def test_a_state_that_was_made_in_the_window_is_none(change):
    assert "stalled" not in facts(lambda: change(torch.ones(64, dtype=torch.bfloat16)))


def test_a_state_that_is_replaced_is_held_against_what_it_replaces():
    state = {"x": ones()}

    def replace():
        state["x"] = state["x"] * 0.9999 + torch.ones(64, dtype=torch.bfloat16) * 5e-5

    assert facts(replace)["stalled"]["stalled"] == 64


def test_counters_stop_at_their_format():
    for stop, dtype in ((256.0, torch.bfloat16), (2048.0, torch.float16), (2.0**24, torch.float32)):
        assert facts(lambda x: x.add_(1.0), torch.tensor(stop, dtype=dtype))["stalled"]["stalled"] == 1
        assert "stalled" not in facts(lambda x: x.add_(1.0), torch.tensor(stop / 2, dtype=dtype))


def compensated(x):
    rest = torch.full((64,), 1e-4, dtype=x.dtype)
    old = x.clone()
    x.add_(rest)
    rest.sub_(x - old)


def averaged_beside_its_remainder(x):
    """Of wide numbers that never lie in the average: the remainder is taken before it is written."""
    rest, weight = torch.zeros(64, dtype=x.dtype), torch.full((64,), 1.01)
    move = 1e-3 * (weight - x.float() - rest.float()) + rest.float()
    new = (x.float() + move).to(x.dtype)
    rest.copy_(move - (new.float() - x.float()))
    x.copy_(new)


ODD = {
    "integers and an epsilon": lambda: torch.arange(8) + 1e-3,
    "keywords": lambda: torch.ops.aten._softmax.default(self=torch.rand(8, 4), dim=1, half_to_float=False),
    "keywords of a clamp": lambda: torch.clamp(torch.rand(8), max=0.5).log(),
    "sparse integers": lambda: torch.eye(3, dtype=torch.int8).to_sparse() * 100 * 100,
    "bytes and booleans": lambda: torch.full((8,), 200, dtype=torch.uint8) + torch.ones(8, dtype=torch.bool),
    "no elements": lambda: torch.rsqrt(torch.rand(0) + 1e-5) + torch.maximum(torch.rand(0), torch.rand(0)),
    "one number": lambda: torch.tensor(1e-9) / (torch.tensor(1e-9) + 1e-5),
    "no arguments": lambda: F.layer_norm(torch.rand(4, 4).bfloat16(), (4,)),
    "bytes": lambda: (torch.full((8,), 200, dtype=torch.uint8) * 2).sum(),
    "in place on bytes": lambda: torch.full((8,), 200, dtype=torch.uint8).add_(100).float(),
}


@pytest.mark.parametrize("run", ODD.values(), ids=ODD)
@pytest.mark.parametrize("stage", ["script", "loss", "optimizer"])
def test_no_odd_call_ends_the_scan(run, stage):
    facts(run, stage=stage)


@pytest.mark.parametrize(
    "square",
    [
        lambda x: (x * x + 1e-6).mean(-1, keepdim=True),
        lambda x: (x * x + 1e-6).sum(-1, keepdim=True),
        lambda x: 0.5 * (x * x + 1e-6) + 0.5 * (x * x + 1e-6),
    ],
    ids=["mean", "sum", "average"],
)
def test_an_epsilon_is_followed_into_what_is_made_of_many_guarded_numbers(square):
    small, large = (torch.linspace(1.0, 2.0, 64).reshape(4, 16) * size for size in (1e-5, 1.0))
    assert facts(lambda x: (x / square(x).sqrt()).sum(), small)["floor"]["constant"] == 1e-6
    assert "floor" not in facts(lambda x: (x / square(x).sqrt()).sum(), large)


def test_the_tolerance_of_a_solver_is_no_epsilon():
    """``atol + rtol * size`` decides on the length of the next step alone, as a number of the script's."""

    def ratio(x, error):
        with torch.no_grad():
            return (error / (1e-6 + 1e-5 * x.abs())).max().clip(min=1e-9)

    small, error = torch.linspace(0.1, 1.0, 64) * 1e-3, torch.linspace(1.0, 2.0, 64) * 1e-7
    assert "floor" not in facts(lambda x: ratio(x, error).item(), small, stage="loss")
    assert "floor" in facts(lambda x: x * ratio(x, error), small, stage="loss")


@pytest.mark.parametrize("constant", [0.1, 1e-3])
def test_a_width_in_code_that_makes_data_is_no_epsilon(constant):
    def bumps(x):
        return (torch.linspace(0.1, 1.0, 64) / (x + constant)).square().sum()

    drawn = torch.linspace(0.0, 1.5 * constant, 64)
    assert ("floor" in facts(bumps, drawn)) == (constant < 0.01)
    assert "floor" in facts(bumps, drawn, stage="loss")


def clipped_by_unit(gradient):
    """The factor of a unit whose gradient is next to nothing is 1 in any case."""
    norm = gradient.square().sum(-1, keepdim=True).sqrt()
    gradient.mul_((torch.ones_like(norm) / norm.clamp(min=1e-6)).clamp(max=1.0))


def test_what_is_bounded_afterwards_was_not_decided_by_an_epsilon():
    assert "floor" not in facts(clipped_by_unit, torch.full((128, 4), 1e-9), stage="optimizer")


def test_one_tensor_of_many_below_the_epsilon_is_none_of_the_line():
    def step(moments):
        for m, square in moments:
            m.sub_(m / (square.sqrt() + 1e-8))

    many = [(torch.ones(64), torch.full((64,), v)) for v in (1e-30, 1.0, 1.0, 1.0, 1.0)]
    assert "floor" not in facts(step, many, stage="optimizer")
    assert facts(step, many[:1], stage="optimizer")["floor"]["wrong"] == 64


def damped(curvature):
    """A natural gradient on the diagonal of the Fisher matrix, and one in the basis of two Kronecker factors."""
    factor = curvature.mean(1)
    return torch.ones(64, 64) / (curvature + 1e-3), torch.ones(64, 64) / (factor[:, None] * factor + 1e-2)


QUOTIENTS = {
    "natural gradient": (damped, False),
    "Adam": (lambda v: v / (v.sqrt() + 1e-2), True),
    "a corrected second moment": (lambda v: v / (v.sqrt() / 0.03).add_(1e-2), True),
    "the sum's root": (lambda v: v / (v + 1e-2).sqrt(), True),
    "a power": (lambda v: v / (v**0.5 + 1e-2), True),
}


@pytest.mark.parametrize(("update", "decides"), QUOTIENTS.values(), ids=QUOTIENTS)
def test_damping_of_a_curvature_is_no_epsilon(update, decides):
    assert ("floor" in facts(update, torch.full((64, 64), 1e-8), stage="optimizer")) == decides


HARMLESS = {
    "moves": lambda x: x.mul_(0.9),
    "nothing to do": lambda x: x.add_(torch.zeros(64, dtype=x.dtype)),
    "a branch beside its residual": lambda x: x + 1e-4,
    "compensated": compensated,
    "compensated before": averaged_beside_its_remainder,
    "filled anew": lambda x: x.copy_(torch.ones(64)),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_loses_nothing_is_no_fact(change):
    x = ones()
    assert "stalled" not in facts(change, x)


def test_a_gradient_is_flushed_where_it_is_cast():
    x = torch.ones(8, 4, dtype=torch.float16, requires_grad=True)
    found = facts(lambda: (x.float() * 1e-9).sum().backward(), stage="loss")["flush"]
    assert (found["flushed"], found["of"], found["lost"], found["channels"]) == (32, 32, 1.0, 1.0)
    assert found["op"] == "aten._to_copy.default"


def test_zeros_that_are_zero_in_fp64_are_not_flushed():
    x = torch.ones(8, 4, dtype=torch.float16, requires_grad=True)
    assert "flush" not in facts(lambda: (x - 2).relu().float().sum().backward(), stage="loss")


def test_a_difference_of_rounded_numbers_is_their_rounding():
    times = 1000.0 + 0.01 * torch.arange(32)

    def gaps():
        t = times.bfloat16()
        return t[1:] - t[:-1]

    found = facts(gaps, stage="loss")["cancellation"]
    assert (found["wrong"], found["of"], found["rounded_before"]) == (31, 31, True)
    assert "cancellation" not in facts(lambda: (t := times.bfloat16()) - t.detach(), stage="loss")


def test_a_difference_of_probabilities_in_half_is_held_against_what_they_are_made_of():
    teacher = torch.randn(16, 50)
    logits = (teacher + 0.01 * torch.randn(16, 50)).requires_grad_()

    def divergence(dtype):
        q, p = (torch.softmax(x.to(dtype) / 20, -1) for x in (logits, teacher))
        return (p * (p.log() - q.log())).sum(-1).mean()

    found = facts(divergence, torch.bfloat16, stage="loss")["cancellation"]
    assert found["dtype"] == "bfloat16" and found["wrong"] > found["of"] / 2
    assert "cancellation" not in facts(divergence, torch.float32, stage="loss")


def test_gaps_between_large_numbers_that_were_always_fp32_are_an_ulp_or_nothing():
    seconds = torch.arange(64.0, dtype=torch.float64).square()
    stamps = (1.7e9 + seconds).float()
    found = facts(lambda t: t[1:] - t[:-1], stamps, stage="forward")["cancellation"]
    assert (found["of"], found["ulp"], found["largest"]) == (63, 128.0, float(stamps.max()))
    assert found["wrong"] >= 32 and found["zeros"] < 63
    for healthy in (lambda t: t - t.clone(), lambda t: t[32:] - t[:32], lambda t: t - t.mean()):
        assert "cancellation" not in facts(healthy, stamps, stage="forward")
    assert "cancellation" not in facts(lambda t: t[1:] - t[:-1], seconds.float(), stage="forward")


def test_what_a_comparison_alone_reads_has_no_effect_where_it_decides_the_same():
    p = torch.randn(32, 9).softmax(-1)

    def validated(tolerance):
        return ((p.sum(-1) - 1).abs() < tolerance).all()

    assert "cancellation" not in facts(validated, 1e-6, stage="loss")
    assert "cancellation" in facts(validated, 1e-9, stage="loss")


def test_an_expanded_square_of_data_cancels_in_fp32():
    x = 5e4 + torch.arange(24.0).reshape(8, 3)

    def expanded(points):
        inner, squares = points @ points.t(), points.square().sum(1, keepdim=True)
        return (squares - 2 * inner + squares.t()).clamp(min=0).sqrt()

    found = facts(lambda points: expanded(points).topk(3), x)["cancellation"]
    assert (found["dtype"], found["of_data"]) == ("float32", True)
    assert "cancellation" not in facts(lambda points: expanded(points).topk(3), x - 5e4)
    assert "cancellation" not in facts(expanded, x)  # nothing is made of it
    assert "cancellation" not in facts(lambda points: points - points.mean(0), x)


def test_what_fp32_arithmetic_rounded_is_none_of_a_cast_that_goes_into_it():
    """A polynomial between two steps of an integrator: its highest coefficients cancel, and weigh nothing."""
    start, end, slopes = torch.rand(64), torch.rand(64) * 1e-3, torch.rand(2, 64)
    end, middle = start + end, start + end / 2

    def coefficients(width):
        dt = width.to(torch.float32)
        a = 2 * dt * (slopes[1] - slopes[0]) - 8 * (end + start) + 16 * middle
        b = dt * (5 * slopes[0] - 3 * slopes[1]) + 18 * start + 14 * end - 32 * middle
        return a, b

    assert "cancellation" not in facts(coefficients, torch.tensor(1e-7, dtype=torch.float64))


def test_columns_that_were_cast_cancel_in_a_module_against_a_constant_that_is_older():
    years = torch.stack([2019 + 2 * torch.rand(64), 5 * torch.rand(64)], 1)
    mean = years.mean(0).half()

    def centred(stage):
        mode = ScanMode(64 << 20, values=True)
        with mode:
            mode.stage = stage
            x = years.half()
            mode.modules = [("Net#0", "normalise")]
            kept = (x - mean, x.relu() - x.half())
        assert mode.failure is None
        del kept
        return [e for e in mode.facts() if e["data"]["kind"] == "cancellation"]

    for stage in ("script", "forward"):  # prepared between two steps, or by the model itself
        (found,) = centred(stage)
        assert (found["module"], found["op"]) == ("normalise", "aten.sub.Tensor")
        assert 32 <= found["data"]["wrong"] <= found["data"]["of"] <= 64  # of one column
    years[:, 0] -= 2019.75
    mean.copy_(years.mean(0))
    assert not centred("script")


def clipped(gradient):
    norm = gradient.square().sum().sqrt()
    return gradient * (1024.0 / (norm + 1e-3)).clamp(max=1.0)


def test_an_overflow_behind_the_backward_pass_is_followed_to_what_it_makes_of_gradients():
    gradient = torch.full((64,), 300.0, dtype=torch.float16)
    found = facts(clipped, gradient, stage="optimizer")["overflow"]
    assert (found["seen"], found["phase"]) == (0.0, "optimizer")
    assert found["exact"] == pytest.approx(1 / 2400, rel=1e-3)
    assert "overflow" not in facts(clipped, gradient / 300, stage="optimizer")
    assert "overflow" not in facts(clipped, gradient, stage="script")  # evaluation may lie there


def test_ones_like_a_loss_settle_nothing_about_the_error_in_it():
    def loss():
        x = 20000 + torch.randn(64, 32)
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        ((x - mean) / (variance.clamp(min=0) + 1e-3).sqrt()).square().mean().requires_grad_().backward()

    torch.manual_seed(0)
    found = facts(loss, stage="loss")["cancellation"]
    assert found["effect"] > 0.5


#: Trains in many ways twice from the same seeds, with its first trainings scanned at every step or not at all.
STRANGE = """
import copy, hashlib, os, sys
import torch
import torch.nn.functional as F
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from precdoctor.recording.deepscan import schedule

schedule.offset = lambda number: number  # every step


class Count(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Count.calls += 1
        return func(*args, **(kwargs or {}))


torch.manual_seed(0)
mix = hashlib.sha256()
net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))
critic = nn.Linear(3, 1)
teacher = copy.deepcopy(net)
slow = [p.detach().bfloat16() for p in net.parameters()]
kind = sys.argv[1]
if kind == "closure":
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
elif kind != "by hand":
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=kind == "foreach")
    second = torch.optim.SGD(critic.parameters(), 1e-2)


def loss(model=net):
    x = torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        scores = model(x)
    return F.cross_entropy(scores.float(), torch.randint(0, 3, (8,)))


def again():
    net.zero_grad()
    value = loss()
    value.backward()
    return value


for step in range(5):
    if kind == "modes":
        counting = Count()
        counting.__enter__()
    for micro in range(3 if kind == "accumulated" else 1):
        if kind != "closure":
            (value := loss()).backward()
            mix.update(value.item().hex().encode())
        if kind == "modes" and micro == 0:
            counting.__exit__(None, None, None)
    if kind == "raises":
        try:
            net(torch.randn(8, 7))
        except RuntimeError as error:
            mix.update(b"raised")
    if kind == "two":
        second.zero_grad()
        critic(net(torch.randn(8, 8)).detach()).mean().backward()
        second.step()
    if kind == "closure":
        mix.update(optimizer.step(again).item().hex().encode())
    elif kind == "by hand":
        for p in net.parameters():
            p.data = p.data - 1e-2 * p.grad
            p.grad = None
    else:
        optimizer.step()
        optimizer.zero_grad()
    if kind == "forks" and step == 1 and (child := os.fork()) == 0:
        torch.ones(3).bfloat16().mul_(0.999)
        os._exit(0)
    with torch.no_grad():
        for a, b in zip(teacher.parameters(), net.parameters()):
            a.lerp_(b, 0.1)
        torch._foreach_lerp_(slow, [p.bfloat16() for p in net.parameters()], 1e-3)
        net.eval()
        mix.update(loss().item().hex().encode())
        net.train()
for value in [*net.state_dict().values(), *teacher.state_dict().values(), *slow]:
    mix.update(value.detach().float().numpy().tobytes())
assert torch._C._len_torch_dispatch_stack() <= 1
print("RESULT", mix.hexdigest(), Count.calls)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["plain", "foreach", "autocast", "accumulated", "closure", "by hand", "modes", "raises", "two", "forks"],
)
def test_not_a_bit_changes_with_every_step_scanned(tmp_path, kind):
    script(tmp_path, "strange.py", STRANGE)
    results = []
    for scans in ("off", "1000"):
        done = record(tmp_path, "--force", "--strict", "--deep-scan", scans, "--", *warm("strange.py", kind))
        assert done.status == 0, done.err
        results.append(next(line for line in done.out.decode().split("\n") if line.startswith("RESULT")))
        events = precdoctor.open_run(done.run).events()
        assert not set(events["event"]) & {"error", "incident"}
        rows = [json.loads(d) for e, d in zip(events["event"], events["data"], strict=True) if e == "scan"]
        assert not [d for d in rows if d.get("outcome") == "dropped"]
    assert results[0].split()[:2] == results[1].split()[:2]
    assert any(d["kind"] == "step" for d in rows)


def running_total(terms, *, others: bool = False):
    total = torch.zeros(16, dtype=terms.dtype)
    for k, term in enumerate(terms):
        total.add_(term)
        if others and k % 8 == 7:
            total.zero_()
    return total


def compensated(terms):
    total, rest = (torch.zeros(16, dtype=torch.bfloat16) for _ in range(2))
    for term in terms:
        y = term - rest
        after = total + y
        rest = (after - total) - y
        total = after
    return total


@pytest.mark.parametrize("stage", ["script", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_a_total_of_the_script_is_added_up_a_second_time(stage):
    terms = (0.5 + torch.rand(1024, 16)).bfloat16()
    found = facts(running_total, terms, stage=stage)["total"]
    assert (found["terms"], found["dtype"], found["phase"]) == (1024, "bfloat16", stage)
    assert found["error"] > 0.3
    assert "total" not in facts(running_total, terms.float(), stage=stage)
    assert "total" not in facts(lambda t: running_total(t, others=True), terms, stage=stage)
    assert "total" not in facts(compensated, terms, stage=stage)


def test_counts_that_stand_still_are_a_wrong_sum():
    counts, where = torch.full((8,), 256.0, dtype=torch.bfloat16), torch.arange(8).repeat(40)

    def count(x):
        x.index_add_(0, where, torch.ones(len(where), dtype=x.dtype))

    assert facts(count, counts.clone())["reduction"]["error"] > 0.1
    assert "reduction" not in facts(count, counts.float())


def test_data_is_compared_with_what_it_was_before_its_first_rounding():
    rewards, gaps = 1000 + torch.rand(4, 64), 0.2 + 1.8 * torch.rand(8, 200)
    buffer = torch.zeros(4, 64, dtype=torch.bfloat16)

    def joined(x):
        return torch.cat([r.bfloat16() for r in x]) - torch.full((256,), 1000.0).bfloat16()

    def buffered(x):
        for k, r in enumerate(x):
            buffer[k] = r
        return buffer - (x - 0.5).bfloat16()

    def elapsed(x):
        times = x.bfloat16().cumsum(1)
        return times[:, 1:] - times[:, :-1]

    stamps = 1_700_000_000 + torch.randint(0, 60, (64,)).cumsum(0)
    between = lambda x: x.float()[1:] - x.float()[:-1]  # noqa: E731
    assert facts(between, stamps)["cancellation"]["dtype"] == "float32"
    assert "cancellation" not in facts(between, stamps - 1_700_000_000)
    for run, data in ((joined, rewards), (buffered, rewards), (elapsed, gaps)):
        found = facts(run, data)["cancellation"]
        assert (found["dtype"], found["of_data"], found["rounded_before"]) == ("bfloat16", True, True)
        assert found["noise"] > 0.125
    assert "cancellation" not in facts(buffered, rewards - 1000)
    assert "cancellation" not in facts(elapsed, gaps[:, :4])
    twice = lambda x: x.bfloat16() - (x * (1 + 2e-7)).bfloat16()  # noqa: E731 - the same policy, computed twice
    assert "cancellation" not in facts(twice, rewards)


def test_differences_of_running_sums_in_half_are_judged_where_the_sums_are_large():
    x = (1 + 0.2 * torch.randn(4, 768, 3)).requires_grad_()
    weight = torch.randn(3, 5)

    def means(total):
        return ((total[:, 8:] - total[:, :-8]).float() / 8) @ weight

    def windows(x, dtype=torch.bfloat16):
        return means(x.to(dtype).cumsum(1))

    def rests(x):
        total = x.bfloat16().cumsum(1)
        return means(total[:, -1:] - total)

    def filled(x):
        total = torch.zeros(4, 769, 3, dtype=torch.bfloat16)
        total[:, 1:] = x.bfloat16().cumsum(1)
        return means(total)

    def exclusive(x):
        half = x.bfloat16()
        return means(half.cumsum(1) - half)

    long = (1 + 0.2 * torch.randn(2, 46_000, 3)).requires_grad_()  # more elements than a tensor made in half may have
    assert facts(windows, long)["cancellation"]["noise"] > 0.5
    for run in (windows, rests, filled, exclusive):
        found = facts(run, x)["cancellation"]
        assert found["running_sum"] is True
        assert found["noise"] > 0.125
        assert found["effect"] > 0.01
        assert found["largest"] > 600
    assert "cancellation" not in facts(lambda x: windows(x, torch.float16), x)
    assert "cancellation" not in facts(windows, x[:, :96])
    deviations = lambda x: (y := windows(x)) - y.mean(1, keepdim=True)  # noqa: E731 - of no running sum any more
    assert "cancellation" not in facts(deviations, x[:, :96])


def test_a_buffer_that_is_written_to_leaves_the_source_of_its_first_values_alone():
    source = torch.linspace(1000, 1001, 64, dtype=torch.float64)
    before = source.clone()

    def overwrite(x):
        half = x.half()
        half[:8] = torch.full((8,), 1000.3)
        return half - torch.full((64,), 1000.0).half()

    assert facts(overwrite, source)["cancellation"]["noise"] > 0.125
    assert torch.equal(source, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_indices_that_a_half_precision_table_cannot_hold_are_noted_where_they_are_used(dtype):
    table, packed = torch.randn(12100, 2), torch.randint(10000, 12000, (64,)).to(dtype)
    assert "cast" in facts(lambda x: torch.embedding(table, (x.long() - 1).clamp(min=0)), packed)
    found = facts(lambda x: torch.embedding(table, x.long()), packed)["cast"]
    assert (found["from"], found["to"], found["read_by"]["op"]) == (str(dtype)[6:], "int64", "aten.embedding.default")
    assert found["distinct_after"] * 4 < found["distinct_before"]
    moved = facts(lambda x: torch.embedding(table, (x - 10000).long()), packed)["cast"]
    assert (moved["distinct_before"], moved["distinct_after"]) == (found["distinct_before"], found["distinct_after"])
    assert "cast" not in facts(lambda x: torch.embedding(table, (x - 90).long()), packed / 100)
    assert "cast" not in facts(lambda x: torch.embedding(table, x.long()), packed / 100)
    assert "cast" not in facts(lambda x: x.long().float().mean(), packed)  # no indices


def test_a_cast_of_gradients_behind_the_backward_pass_is_held_against_its_source():
    found = facts(lambda g: g.half().float(), 1e-9 * torch.randn(64), stage="optimizer")["cast"]
    assert (found["lost"], found["flushed"], found["phase"]) == (1.0, 64, "optimizer")
    assert "cast" not in facts(lambda g: g.half().float(), torch.randn(64), stage="optimizer")


@pytest.mark.parametrize("loud", [True, False])
def test_channels_that_a_narrow_cast_loses_count_by_what_they_add_to_the_result(loud):
    x, weight = 0.2 * torch.randn(64, 16), torch.randn(8, 16)
    x[:, 0], weight[:, 0] = (3e5, 1e-6) if loud else (1.0, 1.0)

    def forward():
        scale = 448.0 / x.abs().amax()
        return torch.nn.functional.linear((x * scale).to(torch.float8_e4m3fn).float() / scale, weight)

    found = facts(forward, stage="forward").get("cast")
    if not loud:
        assert found is None
        return
    assert found["channels"] >= 0.9
    assert found["effect"] > 0.5
    assert found["lost"] < 0.1


def test_what_a_straight_through_cast_flushes_is_followed_past_the_loud_channel_it_is_added_to():
    x, weight = 1e-3 * torch.randn(128, 16), 1e3 * torch.randn(32, 16)
    x[:, 0], weight[:, 0] = 360 * torch.rand(128), 1 / 360

    def forward():
        scale = 448.0 / x.abs().amax()
        return torch.nn.functional.linear(x + ((x * scale).to(torch.float8_e4m3fn).float() / scale - x), weight)

    found = facts(forward, stage="forward")["cast"]
    assert found["lost"] < 0.1 < found["effect"]


def test_samples_beside_one_with_an_outlier_count_as_much_as_that_one():
    """The sum over the batch is the outlier's; the median row has lost everything."""
    x, weight = torch.randn(64, 12), torch.randn(16, 12)
    x[:3, 3] = 999_999.0

    def forward(given):
        scale = 448.0 / given.abs().amax()
        return torch.nn.functional.linear((given * scale).to(torch.float8_e4m3fn).float() / scale, weight)

    assert facts(forward, x, stage="forward")["cast"]["effect"] > 0.5
    assert "cast" not in facts(forward, x.clamp(max=3), stage="forward")


@pytest.mark.parametrize("within", [False, True])
def test_a_total_that_goes_down_is_one(within):
    """The negative log-likelihood of a sequence, token by token."""

    def likelihood(terms):
        total = torch.zeros_like(terms[0])
        for term in terms:
            total = total.sub_(term) if within else total - term
        return total

    terms = torch.full((600, 16), -2.75)
    assert facts(likelihood, terms.bfloat16())["total"]["error"] > 0.1
    assert "total" not in facts(likelihood, terms)


def test_a_state_that_is_written_to_between_two_terms_is_no_total():
    """As of a GRU, whose cell is ``(h - n) * z + n``, with two of the three ops in place."""
    torch.manual_seed(0)
    gru, x = torch.nn.GRU(8, 8).bfloat16(), torch.randn(64, 4, 8).bfloat16()
    assert "total" not in facts(lambda x: gru(x)[0], x, stage="forward")


def test_a_total_is_held_against_fp64_between_powers_of_two():
    def positions(mask):
        total = torch.zeros_like(mask[0])
        for row in mask:
            total = total + row
        return total

    found = facts(positions, torch.ones(384, 8, dtype=torch.bfloat16))["total"]
    assert (found["terms"], found["dtype"]) == (384, "bfloat16")
    assert "total" not in facts(positions, torch.ones(250, 8, dtype=torch.bfloat16))


SMALL_STATES = """
import torch
import torch.nn.functional as F
from torch import nn


class Small(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-2})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state.setdefault("square", torch.ones_like(p, dtype=torch.bfloat16)).mul_(0.999).add_(p.grad**2, alpha=1e-3)
            p.addcdiv_(p.grad, state["square"].float().sqrt(), value=-1e-2)


net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = Small(net.parameters())
for step in range(3):
    net(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_state_of_a_hand_written_optimizer_is_named_with_its_weight(tmp_path):
    script(tmp_path, "small.py", SMALL_STATES)
    done = record(tmp_path, "--strict", "--deep-scan", "3", "--", *warm("small.py"))
    assert done.status == 0, done.err
    events = precdoctor.open_run(done.run).events()
    rows = [json.loads(d) for e, d in zip(events["event"], events["data"], strict=True) if e == "scan"]
    found = [d for d in rows if d["kind"] == "stalled"]
    assert {(d["target"], d["state"]) for d in found} == {("state", "square")}
    assert {d["name"] for d in found} <= {f"{i}.{n}" for i in (0, 2) for n in ("weight", "bias")}
    assert {tuple(d["owner"]) for d in found} <= {("Sequential#0", "0"), ("Sequential#0", "2")}


LONG_FORWARD = """
import torch
from precdoctor.recording.deepscan import scan_mode

scan_mode.MAX_OPS = 50


class Loop(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = torch.nn.Linear(4, 4)

    def forward(self, x):
        modes = []
        for _ in range(60):
            x = self.cell(x).tanh()
            modes.append(torch._C._len_torch_dispatch_stack())
        print(modes[0], modes[-1])
        return x


model = Loop()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
"""


def test_a_scan_that_has_seen_all_it_will_is_out_of_the_way(tmp_path):
    script(tmp_path, "long.py", LONG_FORWARD)
    done = record(tmp_path, "--strict", "--deep-scan", "2", "--", *warm("long.py"))
    assert done.status == 0, done.err
    modes = [tuple(map(int, line.split())) for line in done.out.decode().splitlines()]
    assert [before - after for before, after in modes] == [1, 1, 0]  # two steps are scanned
    events = precdoctor.open_run(done.run).events()
    steps = [d for d in map(json.loads, events["data"][events["event"] == "scan"]) if d["kind"] == "step"]
    assert [(step["outcome"], step["complete"]) for step in steps] == [("done", False)] * 2


MICRO_STEPS = """
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
total = [torch.zeros_like(p) for p in net.parameters()]
for _ in range(3):
    if {once}:
        optimizer.zero_grad()
    for _ in range(3):
        x = torch.randn(16, 8, requires_grad=True)
        loss = net(x).square().mean()
        if not {once}:
            optimizer.zero_grad(set_to_none={to_none})
        loss.backward()
        {then}
    optimizer.step()
"""
THEN = {
    "nothing": "pass",
    "they are summed": "[t.add_(p.grad) for t, p in zip(total, net.parameters())]",
    "they are kept": "held = [p.grad for p in net.parameters()]",
    "the input's is read": "x.grad.sign()",
    "a layer's is read later": "len(seen) % 3 == 2 and seen[-2].square()",
    "a layer's is kept": "len(seen)",
}


@pytest.mark.parametrize(
    ("once", "to_none", "then", "dropped"),
    [(False, True, "nothing", True), (False, False, "nothing", True), (True, True, "nothing", False),
     (False, True, "they are summed", False), (False, True, "they are kept", False),
     (False, True, "the input's is read", False), (False, True, "a layer's is read later", False),
     (False, False, "a layer's is read later", False), (False, False, "a layer's is kept", True)],
)  # fmt: skip
def test_gradients_of_a_micro_step_that_nobody_reads_before_they_are_gone(tmp_path, once, to_none, then, dropped):
    code = MICRO_STEPS.format(once=once, to_none=to_none, then=THEN[then])
    if "seen" in THEN[then]:
        hook = "seen = []\nnet.register_full_backward_hook(lambda m, i, o: seen.append(o[0]))\n"
        code = code.replace("for _", f"{hook}for _", 1)
    script(tmp_path, "micro.py", code)
    done = record(tmp_path, "--strict", "--deep-scan", "2", "--", *warm("micro.py"))
    assert done.status == 0, done.err
    events = precdoctor.open_run(done.run).events()
    scans = events[events["event"] == "scan"].assign(data=lambda e: e["data"].map(json.loads))
    found = [s for s in scans.itertuples() if s.data["kind"] == "dropped"]
    assert [s.data["weights"] for s in found] == ([2, 2] if dropped else [])
    assert all(s.line for s in found)


TWO_LOSSES = """
import torch
from torch import nn

trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU())
heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])
optimizer = torch.optim.SGD([*trunk.parameters(), *heads.parameters()], 0.1)
for _ in range(3):
    shared = trunk(torch.randn(16, 8))
    first, second = (head(shared).square().mean() for head in heads)
    optimizer.zero_grad()
    first.backward(retain_graph=True)
    {between}
    second.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("between", ["optimizer.zero_grad()", "pass"])
def test_gradients_of_the_first_of_two_losses_of_one_forward_pass(tmp_path, between):
    """The second pass reads the activations that the first one read: these are no gradients that somebody keeps."""
    script(tmp_path, "micro.py", TWO_LOSSES.format(between=between))
    done = record(tmp_path, "--strict", "--deep-scan", "2", "--", *warm("micro.py"))
    assert done.status == 0, done.err
    events = precdoctor.open_run(done.run).events()
    found = [d for d in map(json.loads, events["data"][events["event"] == "scan"]) if d["kind"] == "dropped"]
    assert [d["weights"] for d in found] == ([] if between == "pass" else [6, 6])


LAYER, BIAS, WEIGHT = (f"net.{on}_hook" for on in (
    "register_full_backward", "bias.register_post_accumulate_grad", "weight.register"))  # fmt: skip
HOOKS = {
    "statistics of a layer": (LAYER, "lambda m, i, o: kept.update(f=0.1 * o[0].T @ o[0])", False),
    "statistics in place": (LAYER, "lambda m, i, o: fisher.add_(o[0].T @ o[0]) is None or None", False),
    "importance of weights": (BIAS, "lambda p: square.addcmul_(p.grad, p.grad) is None or None", False),
    "the gradient itself": (LAYER, "lambda m, i, o: kept.update(f=o[0].detach())", False),
    "a copy for NumPy": (LAYER, "lambda m, i, o: kept.update(f=o[0].numpy().copy())", False),
    "its norm": (WEIGHT, "lambda g: kept.update(f=g.norm().item())", False),
    "clamped": (WEIGHT, "lambda g: g.clamp(-1, 1)", True),
    "decayed": (WEIGHT, "lambda g: g.mul_(0.5) + 0.1 * net.weight.detach()", True),
    "examined": (WEIGHT, "lambda g: None if g.isfinite().all() else g.zero_()", True),
    "counted": (BIAS, "lambda p: square.add_(1) is None or None", True),
}


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize(("on", "hook", "dropped"), HOOKS.values(), ids=HOOKS)
def test_a_hook_that_keeps_something_has_used_the_gradients(tmp_path, on, hook, dropped, to_none):
    made = f"kept, fisher, square = {{}}, torch.zeros(4, 4), torch.zeros(4)\n{on}({hook})\noptimizer ="
    script(tmp_path, "micro.py",
           MICRO_STEPS.format(once=False, to_none=to_none, then="pass").replace("optimizer =", made, 1))  # fmt: skip
    done = record(tmp_path, "--strict", "--deep-scan", "2", "--", *warm("micro.py"))
    assert done.status == 0, done.err
    events = precdoctor.open_run(done.run).events()
    found = [d for d in map(json.loads, events["data"][events["event"] == "scan"]) if d["kind"] == "dropped"]
    assert [d["weights"] for d in found] == ([2, 2] if dropped else [])


NORMALISED = {
    "softmax": (lambda x, y: F.cross_entropy(x.softmax(-1), y), ("softmax", 5)),
    "cast": (lambda x, y: F.cross_entropy(x.bfloat16().softmax(-1).float(), y), ("softmax", 5)),
    "sigmoid": (lambda x, y: F.binary_cross_entropy_with_logits(x.sigmoid()[:, 0], y / 4.0), ("sigmoid", 2)),
    "logits": (lambda x, y: F.cross_entropy(x, y), None),
    "entropy": (lambda x, y: -(x.softmax(-1) * x.log_softmax(-1)).sum(), None),
    "gate": (lambda x, y: F.cross_entropy(x * x.sigmoid(), y), None),
    "attention": (lambda x, y: F.cross_entropy(x.softmax(-1) @ torch.eye(5), y), None),
}


@pytest.mark.parametrize(("loss", "found"), NORMALISED.values(), ids=NORMALISED)
def test_a_loss_that_is_given_probabilities_for_logits_is_told(loss, found):
    logits = torch.randn(16, 5, requires_grad=True)
    seen = facts(loss, logits, torch.arange(16) % 5, stage="loss").get("closed")
    assert (seen and (seen["function"], seen["classes"])) == found


def test_through_one_element_alone_all_passes_or_nothing():
    """The entropy of a mean over the batch, clamped under its logarithm: sixteen numbers are not sixteen channels."""
    shares = torch.softmax(torch.tensor([[0.0] * 4 + [-40.0] * 12]), -1).requires_grad_()

    def entropy(rows):
        p = shares.expand(rows, 16) * 1.0
        (-(p.detach() * p.clamp(min=1e-5).log())).sum().backward()

    assert "closed" not in facts(entropy, 1, stage="backward")
    assert facts(entropy, 8, stage="backward")["closed"]["channels"] == 0.75


ROUNDING = """
import torch
from torch import nn

net = nn.Linear(8, 16)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    x = net(torch.randn(16, 8))
    y = {rounded}
    optimizer.zero_grad()
    (y - 1).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("rounded", "zeros"), [("torch.round(x * 16)", 2), ("torch.floor(x * 16)", 2), ("x.sign()", 2),
                           ("x + torch.round(x) - x.detach()", 0), ("x", None)],
)  # fmt: skip
def test_what_is_flat_everywhere_ends_the_gradient(tmp_path, rounded, zeros):
    script(tmp_path, "rounding.py", ROUNDING.format(rounded=rounded))
    done = record(tmp_path, "--strict", "--deep-scan", "2", "--", *warm("rounding.py"))
    assert done.status == 0, done.err
    events = precdoctor.open_run(done.run).events()
    closed = [d for d in map(json.loads, events["data"][events["event"] == "scan"]) if d["kind"] == "closed"]
    assert [d["zero_gradients"] for d in closed] == ([] if zeros is None else [zeros] * 2)


@pytest.mark.parametrize("logarithm", [torch.log, lambda p: p, lambda p: p.clone().view(64, 10)])
def test_probabilities_that_are_read_as_logarithms_are_noted(logarithm):
    scores, targets = torch.randn(64, 10), torch.arange(64) % 10
    loss = facts(lambda x: torch.nn.functional.nll_loss(logarithm(x.softmax(-1)), targets), scores, stage="loss")
    assert ("closed" in loss) == (logarithm is not torch.log)
    if "closed" in loss:
        assert loss["closed"]["without_log"] is True
        assert loss["closed"]["made_by"]["op"] == "aten._softmax.default"
    plain = facts(lambda x: torch.nn.functional.cross_entropy(x, targets), scores, stage="loss")
    assert "closed" not in plain


@pytest.mark.parametrize("logarithm", [torch.log, lambda p: p])
@pytest.mark.parametrize("reduction", ["none", "batchmean"])
def test_a_divergence_of_probabilities_is_noted_and_one_of_their_logarithms_is_not(logarithm, reduction):
    scores, target = torch.randn(64, 10), torch.randn(64, 10).softmax(-1)
    loss = facts(
        lambda x: torch.nn.functional.kl_div(logarithm(x.softmax(-1)), target, reduction=reduction).sum(),
        scores,
        stage="loss",
    )
    assert ("closed" in loss) == (logarithm is not torch.log)
    if "closed" in loss:
        assert loss["closed"]["loss"] == "kl_div"
        assert loss["closed"]["made_by"]["op"] == "aten._softmax.default"


def parameter_in_half(x):
    """As ``module.half()`` does it."""
    weight = torch.nn.Parameter(x)
    weight.data = weight.half()
    return weight


@pytest.mark.parametrize(
    ("run", "is_fact"),
    [
        (lambda x: x.half(), False),
        (lambda x: x.half().view(8, 8).detach(), False),
        (parameter_in_half, False),
        (lambda x: x.half().float() * 2, True),
        (lambda x: parameter_in_half(x) * 2, True),
        (lambda x: x.half().view(8, 8).float().sum(), True),
        (lambda x: torch.zeros(64, dtype=torch.float16).copy_(x), True),
    ],
)
def test_a_copy_that_nothing_reads_does_no_harm(run, is_fact):
    """Such as the halved weights of a checkpoint."""
    assert ("cast" in facts(run, torch.full((64,), 1e-9))) == is_fact
