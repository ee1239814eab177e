"""Which state of which optimizer gets a row, under which name; and which FP32 parameters are master copies."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from precdoctor.recording.model.module_names import Place
from precdoctor.recording.model.optimizer_contents import gradients_of
from precdoctor.recording.options import RecordOptions
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.slots.step_batch import StepFacts
from precdoctor.recording.steps.optimizer_states import STATE_EVERY, Masters, StateRows, masters_in_state


class Seen(Recorder):
    """Notes what would have been measured."""

    def __init__(self, directory: Path, **options: object) -> None:
        super().__init__(directory / "never-armed", RecordOptions(**options))
        self.rows: dict[tuple[str, str, str], Tensor] = {}

    def measure(self, place, kind, name, x, dense=None, **_):
        assert (place.root, place.module, name) not in self.rows
        self.rows[place.root, place.module, name] = x


def whole(x: Tensor) -> Tensor:
    return x


def state_of(optimizer: torch.optim.Optimizer, recorder: Seen, *driven: torch.optim.Optimizer) -> set[str]:
    """Module and name of the rows after a step."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named = [(p, Place("Net#0", "body", "Linear"), f"w{i}", whole) for i, p in enumerate(parameters)]
    StateRows(recorder).record("Opt#0", (optimizer, *driven), named)
    return {f"{root}|{module}|{name}" for root, module, name in recorder.rows}


def stepped(kind, *shapes: tuple[int, ...], **settings: object) -> torch.optim.Optimizer:
    parameters = [nn.Parameter(torch.ones(shape)) for shape in shapes]
    optimizer = kind(parameters, **settings)
    for p in parameters:
        p.grad = torch.full_like(p, 0.5)
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(
    ("kind", "settings", "keys"),
    [
        (torch.optim.Adam, {}, {"exp_avg", "exp_avg_sq"}),
        (torch.optim.AdamW, {"amsgrad": True, "foreach": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
        (torch.optim.AdamW, {"fused": True}, {"exp_avg", "exp_avg_sq"}),
        (torch.optim.SGD, {"lr": 0.1}, set()),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, {"momentum_buffer"}),
        (torch.optim.RMSprop, {"centered": True}, {"square_avg", "grad_avg"}),
        (torch.optim.Adagrad, {}, {"sum"}),
        (torch.optim.Adafactor, {}, {"row_var", "col_var"}),
    ],
    ids=["adam", "amsgrad", "fused", "sgd", "momentum", "rmsprop", "adagrad", "adafactor"],
)
def test_moments_have_the_name_of_their_parameter_and_step_counters_no_row(tmp_path, kind, settings, keys):
    assert state_of(stepped(kind, (4, 8), **settings), Seen(tmp_path)) == {f"Net#0|body|w0.{key}" for key in keys}


def test_vectors_over_all_parameters_belong_to_the_optimizer(tmp_path):
    parameters = [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2, 2))]
    optimizer = torch.optim.LBFGS(parameters, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in parameters)
        loss.backward()
        return loss

    optimizer.step(closure)
    rows = state_of(optimizer, Seen(tmp_path))
    assert {"Opt#0||d", "Opt#0||prev_flat_grad"} <= rows
    assert all(row.startswith("Opt#0||") for row in rows)


def test_state_of_the_optimizer_that_another_one_drives(tmp_path):
    inner = stepped(torch.optim.Adam, (4,))
    outer = torch.optim.SGD(inner.param_groups[0]["params"], lr=0.0)
    assert state_of(outer, Seen(tmp_path), inner) == {"Net#0|body|w0.exp_avg", "Net#0|body|w0.exp_avg_sq"}


def test_quantised_and_odd_state_is_left_alone(tmp_path):
    optimizer = stepped(torch.optim.Adam, (4,), (4,), (4,))
    first, second, third = optimizer.param_groups[0]["params"]
    optimizer.state[first] = {"state1": torch.zeros(4, dtype=torch.uint8), "qmap1": torch.zeros(256)}
    optimizer.state[second] = "anything"
    optimizer.state["global"] = {"exp_avg": torch.ones(4)}
    assert state_of(optimizer, Seen(tmp_path)) == {"Net#0|body|w2.exp_avg", "Net#0|body|w2.exp_avg_sq"}
    assert first in optimizer.state and third in optimizer.state and len(optimizer.state) == 4, "looking adds nothing"


def test_kinds_that_are_not_wanted_are_not_taken(tmp_path):
    assert state_of(stepped(torch.optim.Adam, (4,)), Seen(tmp_path, kinds=("weight",))) == set()


def test_state_is_taken_seldom_and_in_step_with_other_runs(tmp_path):
    recorder = Seen(tmp_path)
    rows, taken = StateRows(recorder), []
    for step in range(5, 5 + 4 * STATE_EVERY):
        recorder.current = StepFacts(step)
        if rows.due("Adam#0"):
            taken.append(step)
            rows.record("Adam#0", (), ())
        assert not rows.due("Adam#0") or step not in taken, "once per step"
    assert taken == [5, *range(STATE_EVERY, 5 + 4 * STATE_EVERY, STATE_EVERY)]


def models(dtype: torch.dtype) -> tuple[nn.Module, list[nn.Parameter]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(dtype)
    return model, [nn.Parameter(p.detach().float().clone()) for p in model.parameters()]


def found(tmp_path: Path, model: nn.Module, masters: list[nn.Parameter], **options: object) -> list[Tensor | None]:
    recorder = Seen(tmp_path, **options)
    recorder.names.place(model, None)
    known = Masters(recorder)
    known.look_at(torch.optim.AdamW(masters), is_known=lambda _: False)
    return [known.weight_of(m) for m in masters]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_masters_are_told_by_their_values(tmp_path, dtype):
    model, masters = models(dtype)
    weights = list(model.parameters())
    shuffled = [masters[i] for i in (2, 1, 3, 0)]
    assert all(a is weights[i] for a, i in zip(found(tmp_path, model, shuffled), (2, 1, 3, 0), strict=True))


def test_what_is_not_a_copy_of_a_16_bit_weight_is_no_master(tmp_path):
    model, masters = models(torch.float32)
    assert found(tmp_path, model, masters) == [None] * 4, "an FP32 model has none"
    model, masters = models(torch.bfloat16)
    others = [nn.Parameter(m.detach() + 1.0) for m in masters]
    assert found(tmp_path, model, others) == [None] * 4, "other values"
    assert found(tmp_path, model, [nn.Parameter(torch.ones(3))]) == [None], "another shape"


def test_on_a_cpu_masters_are_found_without_a_wait_too(tmp_path):
    model, masters = models(torch.bfloat16)
    assert None not in found(tmp_path, model, masters, on_nonfinite="observe")


def test_masters_in_the_state_go_by_their_name(tmp_path):
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    master = torch.ones(4)
    optimizer.state[parameter] = {"master_param": master, "exp_avg": torch.zeros(4), "master_grad": torch.zeros(2)}
    assert [x is master for x in masters_in_state(optimizer, parameter)] == [True]
    assert state_of(optimizer, Seen(tmp_path)) == {"Net#0|body|w0.exp_avg", "Net#0|body|w0.master_grad"}


def test_nothing_is_kept_alive(tmp_path):
    recorder = Seen(tmp_path)
    model, masters = models(torch.bfloat16)
    recorder.names.place(model, None)
    known = Masters(recorder)
    optimizer = torch.optim.AdamW(masters)
    known.look_at(optimizer, is_known=lambda _: False)
    gone = [weakref.ref(x) for x in (optimizer, masters[0], next(model.parameters()))]
    del model, masters, optimizer
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


def test_gradients_without_version_counters_are_not_held():
    weight = torch.nn.Parameter(torch.ones(2))
    with torch.inference_mode():
        grad = torch.ones(2)
    weight.grad = grad
    assert gradients_of(torch.optim.SGD([weight], 0.1), 1 << 20) == []
    weight.grad = torch.ones(2)
    assert [g for _, g, _ in gradients_of(torch.optim.SGD([weight], 0.1), 1 << 20)] == [weight.grad]
