from __future__ import annotations

import random
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from precdoctor.recording.options import RecordOptions
from precdoctor.recording.scene.root_call import Buffers
from precdoctor.recording.scene.state_restore import RandomState
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.slots.step_batch import StepFacts


class Ops(TorchDispatchMode):
    """Lists the names of ops that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.partition(".")[0])
        return func(*args, **(kwargs or {}))


class Normalize(nn.Module):
    """As in torchvision: a module without parameters, called for every sample."""

    def forward(self, x):
        return (x - 0.5) / 0.25


def scene_of_a_step():
    recorder = types.SimpleNamespace(
        options=RecordOptions(),
        when_forked=[],
        step=0,
        current=StepFacts(0),
        micro_step=0,
        strict=False,
        in_backward=False,
    )
    return Scene(recorder)


def called(scene, module, x):
    call = scene.enter(module, type(module).__name__, (x,), {})
    y = module(x)
    if call is not None:
        scene.leave(call, y)
    return y


def test_transforms_of_single_samples_leave_room_for_the_model():
    scene, normalize, model = scene_of_a_step(), Normalize(), nn.Linear(4, 2)
    batch = torch.stack([called(scene, normalize, torch.rand(4)) for _ in range(200)])
    called(scene, nn.Softplus(), called(scene, model, batch))
    assert scene.refused is None
    assert [c.root for c in scene.calls[-2:]] == ["Linear", "Softplus"] and scene.calls[-2].module is model
    assert len(scene.calls) < 64


def test_what_gradients_go_through_is_never_given_up_for_room():
    scene, double = scene_of_a_step(), nn.Identity()
    for _ in range(65):
        called(scene, double, torch.ones(2, requires_grad=True) * 2)
    assert scene.refused == "the step calls top-level modules more than 64 times"


def test_what_does_not_fit_takes_no_room_from_what_does():
    scene, model = scene_of_a_step(), nn.Linear(4, 1 << 20)
    scene._context.threads, scene._context.current = types.SimpleNamespace(others=()), StepFacts(0)
    scene._context.options, scene._context.on_the_clock = RecordOptions(scene_memory=1 << 20), False
    logits = called(scene, model, torch.rand(2, 4))  # 8 MiB
    small = called(scene, nn.Identity(), torch.ones(2, requires_grad=True) * 2)
    scene._context.in_backward = True
    (logits.mean() + small.sum()).backward()
    first, second = scene.calls
    assert scene.refused is None
    assert first.outputs == [] and first.gradients == {} and first.lost == {""}
    assert len(second.outputs) == 1 and list(second.gradients) == [""] and not second.lost


@torch.no_grad()
def test_of_many_calls_without_gradients_the_newest_are_kept():
    scene, slope = scene_of_a_step(), nn.Linear(2, 2)
    for i in range(300):
        called(scene, slope, torch.full((2,), float(i)))
    assert scene.refused is None and len(scene.calls) < 64
    kept = [int(call.args[0][0]) for call in scene.calls]
    assert kept == list(range(300 - len(kept), 300)) and len(kept) >= 32


@pytest.mark.parametrize("first", [True, False])
def test_a_call_without_gradients_that_does_not_fit_refuses_the_step_only_if_nothing_is_kept(first):
    scene = scene_of_a_step()
    scene._context.options, scene._context.on_the_clock = RecordOptions(scene_memory=1 << 20), False
    if not first:
        called(scene, nn.Linear(2, 2), torch.ones(2))
    with torch.no_grad():
        called(scene, nn.Linear(2, 2), torch.ones(1 << 18, 2))  # 2 MiB
    assert scene.refused == ("its inputs exceed --scene-memory" if first else None)
    assert len(scene.calls) == (0 if first else 1)


# NumPy's global generator is what a replay has to put back.
ANYWHERE = np.random  # loaded by being asked for


def _seed_all():
    random.seed(4)
    ANYWHERE.seed(4)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: None, random.random, lambda: random.gauss(0, 1), lambda: ANYWHERE.rand(), lambda: ANYWHERE.randn(),
        lambda: torch.rand(1), _seed_all,
    ],
)  # fmt: skip
def test_generators_stand_where_they_stand_however_often_and_whenever_one_looks(draw):
    for _ in range(4):
        draw()
        for _ in range(2):
            found, true = RandomState.now(), ANYWHERE.get_state(legacy=False)
            assert found.python == random.getstate() and torch.equal(found.cpu, torch.get_rng_state())
            assert (found.numpy["has_gauss"], found.numpy["gauss"]) == (true["has_gauss"], true["gauss"])
            assert found.numpy["state"]["pos"] == true["state"]["pos"]
            assert (found.numpy["state"]["key"] == true["state"]["key"]).all()


def test_buffers_of_a_format_are_copied_by_one_op():
    model = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(10)))
    model.register_buffer("mask", torch.eye(3).to_sparse())
    model.register_buffer("narrow", torch.ones(4).to(torch.float8_e4m3fn))
    model.register_buffer("narrow_too", torch.ones(4).to(torch.float8_e4m3fn))
    buffers = Buffers(model)
    with Ops() as ops:
        kept = buffers.before(lambda _: True)
    assert (ops.names.count("cat"), ops.names.count("clone")) == (2, 3)
    held = list(model.buffers())
    assert kept.keys() == set(map(id, held))
    model(torch.randn(8, 4))
    for x in held:
        copy = kept[id(x)]
        assert (copy.shape, copy.dtype, copy.layout) == (x.shape, x.dtype, x.layout)
    assert torch.equal(kept[id(model[3].num_batches_tracked)], torch.tensor(0))
    assert torch.equal(kept[id(model[3].running_var)], torch.ones(4))
