"""The recorder on a device that refuses what CUDA refuses; a CPU stands for it (``tests.support.like_cuda``)."""

from __future__ import annotations

import json
import subprocess

import pytest

import precdoctor
from tests.integration.observe.conftest import train
from tests.support.processes import PATIENCE, ROOT, environment, warm

BEGIN = """
import json, sys, torch, precdoctor
from torch import nn
from tests.support import like_cuda
from tests.support.like_cuda import CUDA

like_cuda.install(batches=BATCHES, compiled=COMPILED)
torch.manual_seed(0)

def tell(**more):
    print(json.dumps({"refusals": like_cuda.refused(), "waits": list(CUDA.waits.values()), **more}))
"""


def run(folder, body, *, batches=True, compiled=False):
    """What a script says at its end, and its run, recorded into ``run``; internal errors end it."""
    (folder / "train.py").write_text(BEGIN.replace("BATCHES", str(batches)).replace("COMPILED", str(compiled)) + body)
    done = subprocess.run(
        warm("train.py"),
        cwd=folder,
        env=environment(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["refusals"] == []
    return said, precdoctor.open_run(folder / "run"), done.stderr


def events(run, kind):
    found = run.events()
    return [json.loads(data) for data in found[found["event"] == kind]["data"]]


@pytest.mark.slow  # trains some fifty models
def test_the_whole_zoo_is_recorded_and_none_trains_differently(zoo, tmp_path):
    (recorded,) = train(tmp_path, ZOO_LIKE_CUDA="batches")
    assert recorded.keys() == zoo.plain.keys()
    assert [n for n, line in recorded.items() if line["digest"] != zoo.plain[n]["digest"]] == []
    assert {n: line["refusals"] for n, line in recorded.items() if line["refusals"]} == {}
    # One wait before the optimizer, and one after it. One more for steps that a script skips by itself: the read that
    # shows the skip, and the scaler's result. L-BFGS calls its closure several times, and each call is checked.
    more = {n: line["waits"] for n, line in recorded.items() if line["waits"] > 2}
    assert more.pop("lbfgs") <= 6
    assert set(more) <= {"skips_under_scaler", "skips_two_optimizers"}
    assert set(more.values()) <= {3}
    for name in recorded:
        path = tmp_path / "runs" / name
        assert events(precdoctor.open_run(path), "error") == [], name


CNN = """
model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
model = model.to(memory_format=torch.channels_last)
model[4].DTYPE()
optimizer = torch.optim.OPTIMIZER(model.parameters(), 1e-3)
batched = []
from precdoctor.recording.kernels import cuda
measure_many = cuda.measure_many
def counted(group, members, table, to):
    batched.extend(m.job for m in members)
    return measure_many(group, members, table, to)
cuda.measure_many = counted

with precdoctor.record("run", every=1, strict=True):
    for _ in range(3):
        x = torch.randn(4, 3, 8, 8).to(memory_format=torch.channels_last)
        h = model[:4](x)
        loss = model[4](h.to(model[4].weight.dtype)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
tell(updates=sum(job.before is not None for job in batched))
"""


@pytest.mark.parametrize("batches", [True, False])
@pytest.mark.parametrize("dtype", ["float", "double", "bfloat16"])
def test_channels_last_wide_and_narrow_weights_are_recorded_with_and_without_kernels(tmp_path, dtype, batches):
    body = CNN.replace("DTYPE", dtype).replace("OPTIMIZER", "RMSprop")  # what it intends is the gradient, of its dtype
    said, run_, _ = run(tmp_path, body, batches=batches)
    assert said["waits"] == [2, 2, 2]  # before the optimizer, and behind it
    rows = run_.tensors()
    updates = rows[rows["kind"] == "update"]
    assert len(updates) == 3 * 6 and updates["unchanged"].notna().all()
    # Weights of 64 bits are compared by the reference; gradients are laid out as the weights are, or as cuDNN likes.
    expected = {"float": 18, "bfloat16": 18, "double": 12}[dtype] if batches else 0
    assert said["updates"] == expected


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_no_kernel_fails_at_what_a_scan_of_attention_looks_at(tmp_path, compiled):
    if compiled:
        pytest.importorskip("triton")
    body = """
from benchmarks.models import GPT
model = GPT(1, 16, 2, 8, 32)  # queries, keys and values are one tensor of five dimensions, permuted
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
tokens = torch.randint(32, (2, 8))
with precdoctor.record("run", every=1, strict=True):
    for _ in range(3):
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
tell()
"""
    _, run_, _ = run(tmp_path, body, compiled=compiled)
    assert any(data["ops"] > 20 for data in events(run_, "scan") if data["kind"] == "step")


MLP = """
from precdoctor.recording.observe import gradient_looks
gradient_looks._WORTH_NS = 0  # on a CPU none of the pass is left to be waited for
model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(24)])
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

def step():
    model(torch.randn(4, 8)).square().mean().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
#: Of several blocks of slots, and with a layer 40.
DEEP = MLP.replace("range(24)", "range(60)")


def test_a_step_leaves_the_device_in_one_copy_to_memory_that_is_used_again(tmp_path):
    body = """
from precdoctor.recording.kernels.slot_memory import Bank
sent, copies, large = Bank._snapshot_of_gpu, [], []
def counted(bank, rows):
    before = CUDA.copies
    copied = sent(bank, rows)
    copies.append(CUDA.copies - before)
    large.append(copied._copy.data_ptr())
    return copied
Bank._snapshot_of_gpu = counted
with precdoctor.record("run", every=1, strict=True):
    for _ in range(8):
        step()
        import time
        from precdoctor.recording import installation
        while not installation._installed.drain.idle:
            time.sleep(0.001)
tell(copies=copies, memories=len(set(large)))
"""
    said, run_, _ = run(tmp_path, DEEP + body)
    assert len(run_.tensors()) > 8 * 256  # several blocks of slots
    assert said["copies"][-6:] == [1] * 6 and said["memories"] <= 3


def test_gradients_are_looked_at_in_two_launches_of_ours_and_no_op_of_torchs(tmp_path):
    body = """
import math
from precdoctor.recording.kernels import cuda
from precdoctor.recording.steps import sentinel
looks, norms, true, look = [], [], [], cuda.look
def counted(device, programs, *more, **options):
    looks.append(programs)
    return look(device, programs, *more, **options)
cuda.look = counted
sentinel._norms = lambda *_: 1 / 0
with precdoctor.record("run", every=1024, strict=True):
    for _ in range(6):
        looks.clear()
        model(torch.randn(4, 8)).square().mean().backward()
        true.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters())))
        optimizer.step()
        optimizer.zero_grad()
        norms.append(len(looks))
tell(looks=norms, true=true)
"""
    said, run_, _ = run(tmp_path, MLP + body)
    # Sampled: all of them, and the weights behind the step. Else most within the backward pass, and the rest.
    assert said["looks"] == [2] * 6
    assert said["waits"] == [2] + [1] * 5
    assert run_.steps()["grad_norm"].tolist() == pytest.approx(said["true"], rel=1e-6)


EARLY = """
from precdoctor.recording.slots import step_batch
from precdoctor.recording.microscope.guard import Guard
import math
behind, true, skips = [], [], Guard.skips_step
def counted(guard, optimizer, scaler, look=None):
    found = skips(guard, optimizer, scaler, look)
    behind.append(next(CUDA._numbers) - 1 - CUDA._waited_for)  # events that the device has not got to yet
    return found
Guard.skips_step = counted

def train(steps, poison=()):
    for n in range(steps):
        for micro in range(MICRO):
            loss = model(torch.randn(4, 8)).square().mean()
            if (n, micro) == (poison and poison[0], MICRO - 1):
                model[poison[1]].weight.register_hook(lambda g: g * math.nan)
            loss.backward()
        true.append(math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters())))
        CLIP
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("micro", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "clip", [pytest.param("pass", marks=pytest.mark.slow), "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"]
)
def test_between_samples_the_guard_waits_for_a_look_before_the_end_of_the_backward_pass(tmp_path, micro, clip):
    body = """
with precdoctor.record("run", every=1024, strict=True):
    train(6)
tell(behind=behind, true=true)
"""
    body = MLP + EARLY.replace("MICRO", str(micro)).replace("CLIP", clip) + body
    said, run_, _ = run(tmp_path, body)
    assert said["behind"][0] == 0 and min(said["behind"][1:]) >= 1
    assert said["waits"] == [2] + [1] * 5
    assert run_.steps()["grad_norm"].tolist() == pytest.approx(said["true"], rel=1e-6)
    assert events(run_, "incident") == []


@pytest.mark.slow
def test_where_the_rest_of_the_backward_pass_is_no_work_for_the_host_there_is_one_look_and_no_early_one(tmp_path):
    body = """
gradient_looks._WORTH_NS = 1 << 60
with precdoctor.record("run", every=8, strict=True):
    train(12)
hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
tell(behind=behind, true=true, hooks=sum(hooks))
"""
    said, run_, _ = run(tmp_path, MLP + EARLY.replace("MICRO", "1").replace("CLIP", "pass") + body)
    assert [n > 0 for n in said["behind"]] == [False, True, True] + [False] * 9  # given up in the third, for good
    assert said["hooks"] == 0
    assert run_.steps()["grad_norm"].tolist() == pytest.approx(said["true"], rel=1e-6)


@pytest.mark.parametrize(
    ("layer", "outcome"), [pytest.param(40, "examined at once", marks=pytest.mark.slow), (2, "too late")]
)
def test_a_bad_gradient_among_the_last_is_told_a_step_later(tmp_path, layer, outcome):
    body = f"""
with precdoctor.record("run", every=1024, strict=True):
    train(6, poison=(3, {layer}))
tell()
"""
    _, run_, err = run(tmp_path, DEEP + EARLY.replace("MICRO", "1").replace("CLIP", "pass") + body)
    found = run_.events()
    (incident,) = found[found["event"] == "incident"].to_dict("records")
    data = json.loads(incident["data"])
    assert incident["step"] == 3 and data["gradients_are_bad"]
    assert (data["outcome"] == "refused" and "last to arrive" in data["why"]) == (outcome == "too late")
    assert "step 3: a gradient is not finite" in err


IN_BACKWARD = """
import math
optimizers = {p: torch.optim.SGD([p], 1e-3) for p in model.parameters()}
true, squares = [], []

def step_now(p):
    squares.append(p.grad.double().square().sum().item())
    optimizers[p].step()
    p.grad = None

for p in model.parameters():
    p.register_post_accumulate_grad_hook(step_now)
with precdoctor.record("run", every=1024, strict=True):
    for step in range(6):
        squares.clear()
        loss = model(torch.randn(4, 8)).square().mean()
        if step == 3:
            model[POISON].weight.register_hook(lambda g: g * math.nan)
        loss.backward()
        true.append(math.sqrt(sum(squares)))
tell(true=true)
"""


def test_optimizers_that_step_in_the_backward_pass_wait_once_and_are_judged_a_step_later(tmp_path):
    said, run_, err = run(tmp_path, MLP + IN_BACKWARD.replace("POISON", "2"))
    found = run_.events()
    incident = found[found["event"] == "incident"].iloc[0]

    assert said["waits"][1:3] == [1, 1]
    assert run_.steps()["grad_norm"][:3].tolist() == pytest.approx(said["true"][:3], rel=1e-6)
    assert incident["step"] == 3 and "last to arrive" in json.loads(incident["data"])["why"]
    assert "step 3: a gradient is not finite" in err


def test_an_optimizer_that_makes_weights_of_a_device_non_finite_is_led_to_its_op_on_a_sampled_step(tmp_path):
    body = """
class Signs(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad * p.grad.square().rsqrt(), alpha=1e-3)

optimizer = Signs(model.parameters())
with precdoctor.record("run", every=2, strict=True):
    for i in range(3):
        y = model(torch.randn(4, 8))
        (y.square().mean() if i < 2 else y[:, :4].square().mean()).backward()  # the other outputs have no gradient
        optimizer.step()
        optimizer.zero_grad()
tell()
"""
    _, run_, err = run(tmp_path, DEEP + body)
    assert "the optimizer made 59.weight non-finite" in err
    (finding, *_) = precdoctor.diagnose(run_).findings
    assert (finding.code, finding.location.op, finding.location.step) == ("PD105", "aten.rsqrt.default", 2)
    assert finding.cause == "optimizer-division-by-zero"


@pytest.mark.parametrize("policy", ["observe", pytest.param("skip", marks=pytest.mark.slow)])
def test_no_look_is_early_where_nothing_is_judged_or_weights_are_to_be_kept(tmp_path, policy):
    body = f"""
with precdoctor.record("run", every=1024, strict=True, on_nonfinite="{policy}"):
    train(4)
hooks = [len(p._post_accumulate_grad_hooks or ()) for p in model.parameters()]
tell(behind=behind, hooks=sum(hooks))
"""
    said, _, _ = run(tmp_path, MLP + EARLY.replace("MICRO", "1").replace("CLIP", "pass") + body)
    assert said["hooks"] == 0
    assert said["waits"] == ([2] + [1] * 3 if policy == "skip" else [])


@pytest.mark.parametrize("dtype", ["float", "double"])
def test_gradients_that_each_pass_divides_are_counted_without_waiting(tmp_path, dtype):
    body = f"""
model = nn.Linear(8, 4).{dtype}()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
with precdoctor.record("run", every=1, strict=True, on_nonfinite="observe", deep_scan=0):
    for _ in range(5):
        for _ in range(3):
            model(torch.randn(4, 8).{dtype}()).square().mean().backward()
            for p in model.parameters():
                p.grad.div_(4.0)
        optimizer.step()
        optimizer.zero_grad()
tell()
"""
    said, run_, _ = run(tmp_path, body)
    assert said["waits"] == []
    (found,) = [e for e in events(run_, "warning") if e.get("what") == "rescaled-sum"]
    assert found["factor"] == pytest.approx(0.25) and (found["steps"], found["of"]) == (1, 1)


@pytest.mark.slow
def test_adams_corrections_on_the_device_are_computed_for_all_parameters_at_once(tmp_path):
    body = """
from precdoctor.recording.steps import weight_updates
from precdoctor.recording.observe import optimizer_rows
corrections, counts, whole = weight_updates._corrections, [], []
def counted(t, group):
    counts.append(tuple(t.shape))
    return corrections(t, group)
weight_updates._corrections = counted
intended = optimizer_rows.intended_update
def compared(optimizer, parameter, grad, before, group, given):
    found = intended(optimizer, parameter, grad, before, group, given)
    alone = intended(optimizer, parameter, grad, before, group)
    counts.pop()
    whole.append(bool(torch.eq(found.factor, alone.factor) & torch.eq(found.root, alone.root)))
    return found
optimizer_rows.intended_update = compared
with precdoctor.record("run", every=1, strict=True):
    for _ in range(3):
        step()
tell(counts=counts, whole=sum(whole), all=len(whole))
"""
    said, _, _ = run(tmp_path, DEEP + body)
    assert said["counts"] == [[120]] * 3
    assert said["whole"] == said["all"] == 3 * 120


def test_a_snapshot_comes_after_launches_on_other_streams_and_they_after_it(tmp_path):
    body = """
with precdoctor.record("run", every=1, strict=True):
    step()
    CUDA.stream = 7
    h = model(torch.randn(4, 8))
    CUDA.stream = 0
    CUDA.followed.clear()
    h.square().mean().backward()
    optimizer.step()
    followed = list(CUDA.followed)
tell(followed=followed)
"""
    said, _, _ = run(tmp_path, MLP + body)
    assert said["followed"][-2:] == [[0, 7], [7, 0]]


def test_launches_on_other_streams_come_after_rows_are_filled(tmp_path):
    body = """
model(torch.randn(4, 8))
found = []
with precdoctor.record("run", every=1, strict=True, deep_scan=0):
    for stream in (0, 7, 9, 0):  # the first fills the rows; the second makes more, and so does the third
        CUDA.stream = stream
        CUDA.followed.clear()
        for _ in range(1 if stream == 0 else 3):
            model(torch.randn(4, 8))
        found.append(list(CUDA.followed))
    CUDA.stream = 0
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    CUDA.stream = 5
    CUDA.followed.clear()
    model(torch.randn(4, 8))
    model(torch.randn(4, 8))
tell(found=found, later=CUDA.followed)
"""
    said, _, _ = run(tmp_path, DEEP + body)
    assert said["found"] == [[], [[7, 0]], [[9, 7]], [[0, 9]]]
    assert said["later"] == [[5, 0]]


def test_a_whole_step_that_is_captured_holds_nothing_but_statistics(tmp_path):
    body = """
with precdoctor.record("run", every=1, strict=True):
    for _ in range(2):
        step()
    pinned, CUDA.capturing = CUDA.pinned, True
    step()
    step()
    nn.Linear(8, 2)(torch.randn(2, 8)).sum().backward()  # its slots have no memory yet
    assert CUDA.pinned == pinned
    CUDA.capturing = False
    for _ in range(2):
        step()
tell()
"""
    _, run_, err = run(tmp_path, MLP + body)
    assert run_.steps()["step"].tolist() == [0, 1, 2, 3] and run_.steps()["complete"].all()
    assert err.count("a training step is captured in a CUDA graph") == 1
    assert [e["message"] for e in events(run_, "warning") if "CUDA graph" in e["message"]]
    rows = run_.tensors()
    outputs = rows[(rows["kind"] == "output") & (rows["module"] == "0")].groupby("step")["numel"].sum()
    assert outputs[1] == 32 and outputs[2] == 3 * 32, "the captured launches go into the next step"


@pytest.mark.slow
def test_a_capture_that_comes_first_gets_no_memory_for_statistics(tmp_path):
    body = """
with precdoctor.record("run", every=1, strict=True):
    CUDA.capturing = True
    step()
    CUDA.capturing = False
    step()
    step()
tell()
"""
    _, run_, _ = run(tmp_path, MLP + body)
    rows = run_.tensors()
    outputs = rows[(rows["kind"] == "output") & (rows["module"] == "0")]
    assert outputs["numel"].tolist() == [32, 32]


FP8 = """
class Cast(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        weight = self.linear.weight
        scale = 448.0 / weight.detach().abs().max()
        narrow = (weight * scale).to(torch.float8_e4m3fn)
        return x @ (narrow.to(torch.float32) / scale).t()

class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.cast, self.captures = Cast(), False

    def forward(self, x):
        CUDA.capturing = CUDA.capturing or self.captures
        (torch.ones(8) * torch.tensor(2.0)).to(torch.float8_e4m3fn)
        return self.cast(x)

model = Outer()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
with precdoctor.record("run", every=1, strict=True):
    for n in range(6):
        model.captures = n == 3
        CUDA.capturing = WHEN == "outside" and model.captures
        pinned = CUDA.pinned
        y = model(torch.randn(4, 8))
        assert CUDA.pinned == pinned or not model.captures
        CUDA.capturing = False
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
tell()
"""


@pytest.mark.parametrize("when", ["outside", "inside"])
def test_no_scale_of_a_cast_is_copied_while_a_graph_is_captured(tmp_path, when):
    _, run_, _ = run(tmp_path, FP8.replace("WHEN", repr(when)))
    rows = run_.tensors()
    casts = rows[(rows["kind"] == "fp8_operand") & (rows["module"] == "cast") & (rows["name"] != "grad_output")]
    scales = casts.set_index("step")["scale"]
    assert scales.isna().to_dict() == {1: False, 2: False, 3: True, 4: False, 5: False}


INCIDENT = """
CUDA.peak, CUDA.free = PEAK << 30, 4 << 30
class Log(nn.Module):
    def forward(self, x, bad):
        return torch.log(x - 100.0) if bad else x
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.log = nn.Linear(8, 8), Log()
    def forward(self, x, bad):
        return self.log(self.inner(x), bad)
states, get = [], torch.cuda.get_rng_state
def counted(device):
    states.append(device)
    return torch.zeros(16, dtype=torch.uint8)
torch.cuda.get_rng_state = counted
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
with precdoctor.record("run", every=1, strict=True):
    for step in range(3):
        asked = len(states)
        model(torch.randn(4, 8), step == 2).square().mean().backward()
        asked = len(states) - asked
        optimizer.step()
        optimizer.zero_grad()
tell(asked=asked)
"""


@pytest.mark.parametrize(("peak", "outcome"), [(3, "origin"), (61, "refused")])
def test_a_replay_asks_for_room_first(tmp_path, peak, outcome):
    said, run_, err = run(tmp_path, INCIDENT.replace("PEAK", str(peak)))
    (incident,) = events(run_, "incident")
    assert incident["outcome"] == outcome
    if outcome == "refused":
        sentence = "not enough device memory: a replay may need 61.0 GiB, and cuda:0 has 4.0 GiB left"
        assert incident["why"] == sentence and f"({sentence})" in err
    assert said["asked"] == 1, "of eight devices, the random state of the one that the model is on"


def test_neither_does_a_comparison_with_a_wide_reference_begin_without_room(tmp_path):
    body = """
from pathlib import Path
from precdoctor.recording import installation
from precdoctor.recording.options import RecordOptions
from precdoctor.runlog.layout import create_run

CUDA.peak, CUDA.free = 61 << 30, 4 << 30
create_run(Path("run"), {"command": ["train.py"]}, force=False)
recorder = installation.begin(Path("run"), RecordOptions(strict=True, shadow="fp32"))
step()
recorder.close()
tell()
"""
    _, run_, _ = run(tmp_path, MLP + body)
    (found,) = [e for data in run_.events()["data"] if "reference" in (e := json.loads(data))]
    assert found["outcome"] == "refused" and found["why"].startswith("not enough device memory: ")


GENERATES = """
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x, past=None):
        q, k, v = (f(x).view(2, -1, 2, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        if past is not None:
            k, v = torch.cat([past[0][0], k], 2), torch.cat([past[0][1], v], 2)
        return F.scaled_dot_product_attention(q, k, v), [(k, v)]

net, past = Net().eval(), None
with precdoctor.record("run", inference=True, strict=True), torch.no_grad():
    for step in range(3):
        _, past = net(torch.randn(2, 4 if step == 0 else 1, 16), past)
tell()
"""


def test_groups_of_an_inference_run_are_measured_without_waiting(tmp_path):
    said, recorded, _ = run(tmp_path, GENERATES)
    assert said["waits"] == []
    keys = recorded.tensors(filters=[("kind", "==", "kv_key")])
    assert [sum(counts) for counts in keys["token_hist"]] == [2 * 2 * t * 7 for t in (4, 5, 6)]
    assert events(recorded, "error") == []
