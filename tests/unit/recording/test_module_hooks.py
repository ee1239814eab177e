"""The global module hooks leave torch's tables between samples, and come back whatever ends the call."""

from __future__ import annotations

import copy
import pickle
import types

import pytest
import torch
from torch import nn
from torch.nn.modules import module as tables

from precdoctor.recording.observe.module_hooks import ModuleHooks


class Fixture:
    """Hooks that rest inside every top-level call; what they were called with."""

    def __init__(self):
        threads = types.SimpleNamespace(others=set())
        self.recorder = types.SimpleNamespace(threads=threads, when_forked=[])
        self.hooks = ModuleHooks(self.recorder)
        self.seen = []
        self.hooks.stay = False
        self.hooks.install(self.before, self.after)

    def before(self, module, _args):
        self.seen.append(("before", module))
        self.hooks.rest_inside(module)

    def after(self, module, _args, result):
        self.seen.append(("after", module, result is not None))


def in_place():
    return len(tables._global_forward_pre_hooks), len(tables._global_forward_hooks)


@pytest.fixture
def fixture():
    names = ("_global_forward_pre_hooks", "_global_forward_hooks", "_global_forward_hooks_always_called")
    before = {name: dict(getattr(tables, name)) for name in names}
    for name in names:
        getattr(tables, name).clear()
    yield Fixture()
    for name in names:
        getattr(tables, name).clear()
        getattr(tables, name).update(before[name])


class Fails(nn.Module):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, _x):
        raise self.error


def clean(module):
    return not module._forward_hooks and not module._forward_hooks_always_called


def test_torch_reads_its_tables_as_needed(fixture):
    fixture.hooks.take_out()  # where somebody has hooks, nothing is tried
    assert not ModuleHooks(fixture.recorder).stay
    fixture.hooks.resume()
    assert ModuleHooks(fixture.recorder).stay


def test_only_the_top_level_call_is_seen(fixture):
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for _ in range(2):
        net(torch.ones(1, 2))
    assert fixture.seen == [("before", net), ("after", net, True)] * 2
    assert in_place() == (1, 1) and clean(net)


def test_an_exception_brings_them_back(fixture):
    net = nn.Sequential(nn.Linear(2, 2), Fails(ValueError("mine")))
    with pytest.raises(ValueError, match="mine"):
        net(torch.ones(1, 2))
    assert fixture.seen == [("before", net), ("after", net, False)]
    assert in_place() == (1, 1) and clean(net)


def test_a_keyboard_interrupt_is_noticed_at_the_next_step(fixture):
    """Torch calls no hook then. What is saved of the module meanwhile needs nothing of ours."""
    net = nn.Sequential(Fails(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        net(torch.ones(1, 2))
    assert in_place() == (0, 0)
    saved = pickle.dumps(dict(net._forward_hooks))
    assert b"precdoctor" not in saved
    (hook,) = pickle.loads(saved).values()
    assert hook(net, (), torch.ones(())) is None
    assert copy.deepcopy(net[:0])(torch.ones(1)) is not None
    fixture.hooks.resume()
    assert in_place() == (1, 1) and clean(net)


@pytest.mark.parametrize("where", ["global pre", "global", "of the module"])
def test_other_peoples_hooks_keep_their_order(fixture, where):
    net, order = nn.Sequential(nn.Linear(2, 2)), []
    register = {
        "global pre": tables.register_module_forward_pre_hook,
        "global": tables.register_module_forward_hook,
        "of the module": net.register_forward_hook,
    }[where]
    handle = register(lambda module, *_: order.append((len(fixture.seen), module)))
    net(torch.ones(1, 2))
    handle.remove()
    calls = [net] if where == "of the module" else [net, net[0]]
    assert {id(module) for _, module in order} == {id(module) for module in calls}
    assert [what for what, *_ in fixture.seen] == ["before", "before", "after", "after"]  # inner calls, as well


def test_a_hook_registered_inside_the_call_stays(fixture):
    class Registers(nn.Module):
        def forward(self, x):
            tables.register_module_forward_hook(lambda *_: seen.append("theirs"))
            return x

    net, seen = Registers(), []
    net(torch.ones(1))
    assert seen == ["theirs"]
    assert next(iter(tables._global_forward_hooks.values())) == fixture.after and in_place() == (1, 2)


def test_they_stay_while_other_threads_use_models_and_once_something_is_compiled(fixture):
    net = nn.Sequential(nn.Linear(2, 2))
    fixture.recorder.threads.others.add(1)
    net(torch.ones(1, 2))
    assert len(fixture.seen) == 4
    fixture.recorder.threads.others.clear()
    fixture.hooks.compiles()
    net(torch.ones(1, 2))
    assert len(fixture.seen) == 8


def test_a_layer_that_looks_for_hooks_has_none(fixture):
    layer = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True).eval()
    seen = []
    layer.norm1.register_forward_pre_hook(lambda *_: seen.append(len(layer._forward_hooks)))
    layer(torch.ones(1, 2, 4))
    assert seen == [0]


def test_a_backward_pass_is_left_alone_until_it_ends(fixture):
    fixture.hooks.take_out()
    assert in_place() == (0, 0)
    fixture.hooks.resume()
    assert in_place() == (1, 1)
