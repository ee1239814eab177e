"""Which gradients still carry the loss scale, with one optimizer and with several."""

from __future__ import annotations

import types
import weakref

import pytest

torch = pytest.importorskip("torch")

from precdoctor.recording.steps.loss_scalers import Scalers  # noqa: E402
from precdoctor.recording.steps.missing_zero_grad import KeptGradients  # noqa: E402


@pytest.fixture
def training():
    """Two layers, an optimizer each, one scaler, after the backward pass."""
    layers = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in layers]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    recorder = types.SimpleNamespace(when_forked=[])
    kept = types.SimpleNamespace(written_since_backward=lambda _: False)
    scalers = Scalers(recorder, kept, None, None, None, {id(o): o for o in optimizers}.get)
    scaler.scale(layers[1](layers[0](torch.ones(2, 3))).sum()).backward()
    scalers.in_use[id(scaler)] = weakref.ref(scaler)
    return scalers, scaler, optimizers, layers


def parameters(*layers):
    return [p for layer in layers for p in layer.parameters()]


def test_unknown_without_a_scaler(training):
    scalers, _, _, layers = training
    scalers.in_use.clear()
    assert scalers.still_scaled(parameters(*layers)) is None


def test_a_script_that_wrote_to_gradients_has_unscaled_them_by_hand(training):
    scalers, _, _, layers = training
    for written, said in ((True, False), (None, None)):
        scalers._kept.written_since_backward = lambda _, written=written: written
        assert scalers.still_scaled(parameters(*layers)) is said


def test_writes_to_the_gradients_of_another_optimizer_are_none_to_these(training):
    _, _, optimizers, (one, two) = training
    current = types.SimpleNamespace(step=0, clip_norm=None, left_out=False, not_reached=False)
    context = {"when_forked": [], "when_closing": [], "step": 0, "micro_step": 1, "live": False}
    kept = KeptGradients(types.SimpleNamespace(**context, current=current))
    assert kept.written_since_backward(parameters(one)) is None, "nothing is watched before the first step"
    for optimizer in optimizers:
        kept.attempt_ended(optimizer, "SGD#0", plain=False)
        optimizer.zero_grad()
    two(one(torch.ones(2, 3))).sum().backward()
    kept.backward_ended()
    optimizers[1].zero_grad(set_to_none=False)
    assert kept.written_since_backward(parameters(one)) is False
    assert kept.written_since_backward(parameters(two)) is True


def test_writes_to_some_gradients_of_an_optimizer_are_seen_beside_the_watched_one():
    """The biggest gradient is watched; the script divides those of another layer, and clips these."""
    layers = torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(parameters(*layers), 0.1)
    current = types.SimpleNamespace(step=0, clip_norm=None, left_out=False, not_reached=False)
    context = {"when_forked": [], "when_closing": [], "step": 0, "micro_step": 1, "live": False}
    kept = KeptGradients(types.SimpleNamespace(**context, current=current))
    kept.attempt_ended(optimizer, "SGD#0", plain=False)
    optimizer.zero_grad()
    layers[1](layers[0](torch.ones(2, 3))).sum().backward()
    kept.backward_ended()
    [watch] = kept._watches.values()
    watched = watch.state.parameter()
    others = [p for p in parameters(*layers) if p is not watched]
    assert kept.written_since_backward(others) is False
    others[0].grad.div_(2)
    assert kept.written_since_backward(others) is False, "not all of them"
    for p in others[1:]:
        p.grad.div_(2)
    assert kept.written_since_backward(others) is True
    assert kept.written_since_backward(parameters(*layers)) is False, "the watched one decides"


def test_every_optimizer_of_the_parameters_has_to_be_unscaled(training):
    scalers, scaler, (first, second), (one, two) = training
    assert scalers.still_scaled(parameters(one, two)) is True
    scaler.unscale_(second)
    assert scalers.still_scaled(parameters(one, two)) is True
    assert scalers.still_scaled(parameters(two)) is False
    assert scalers.still_scaled(parameters(one)) is True
    scaler.unscale_(first)
    assert scalers.still_scaled(parameters(one, two)) is False


def test_what_has_stepped_is_unscaled(training):
    scalers, scaler, (first, second), (one, two) = training
    scaler.step(first)
    assert scalers.still_scaled(parameters(two)) is True
    scaler.unscale_(second)
    assert scalers.still_scaled(parameters(one, two)) is False


def test_frozen_parameters_and_those_without_gradient_do_not_count(training):
    scalers, scaler, (_, second), (one, two) = training
    scaler.unscale_(second)
    one.weight.requires_grad_(False)
    one.bias.grad = None
    assert scalers.still_scaled(parameters(one, two)) is False


def test_an_optimizer_nobody_has_met_is_believed(training):
    scalers, scaler, (_, second), layers = training
    scalers._optimizer_of = lambda _: None
    scaler.unscale_(second)
    assert scalers.still_scaled(parameters(*layers)) is False


def test_a_scaler_is_logged_in_every_run_that_uses_it(training):
    scalers, scaler, _, _ = training
    for _ in range(2):  # a second `precdoctor.record` in one process
        logged = []
        scalers._recorder.facts = types.SimpleNamespace(scaler=logged.append)
        scalers._meet(scaler)
        assert logged == [scaler]
