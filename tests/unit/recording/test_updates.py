"""The recomputed update against what torch's own optimizers do to float64 weights."""

from __future__ import annotations

import pytest
import torch

from precdoctor.recording.kernels import Adam
from precdoctor.recording.steps import weight_updates
from precdoctor.recording.steps.weight_updates import intention_of


def intended_update(optimizer, weight, before, group):
    found = weight_updates.intended_update(optimizer, weight, weight.grad, before, group)
    return found.update(before) if isinstance(found, Adam) else found


SETTINGS = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.05}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.05}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True, "foreach": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "betas": (0.3, 0.5)}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.01, "maximize": True, "eps": 1e-3}),
    (torch.optim.Adam, {"lr": torch.tensor(0.01, dtype=torch.float64), "capturable": False}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS, ids=str)
def test_the_intended_update_is_the_difference_in_float64(kind, settings):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 7, dtype=torch.float64))
    optimizer = kind([weight], **settings)
    for _ in range(4):
        weight.grad = torch.randn_like(weight)
        before = weight.detach().clone()
        optimizer.step()
        intended = intended_update(optimizer, weight, before, optimizer.param_groups[0])
        assert intended.shape == weight.shape
        torch.testing.assert_close(intended, weight.detach() - before, rtol=1e-9, atol=1e-12)
    assert intention_of(optimizer) == "exact"


@pytest.mark.parametrize(("kind", "settings"), SETTINGS[:7], ids=str)
def test_complex_weights_are_pairs_of_real_ones(kind, settings):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(5, 7, dtype=torch.complex128))
    optimizer = kind([weight], **{key: value for key, value in settings.items() if key != "fused"})
    for _ in range(4):
        weight.grad = torch.randn_like(weight)
        before = torch.view_as_real(weight.detach()).clone()
        optimizer.step()
        intended = intended_update(optimizer, weight, before, optimizer.param_groups[0])
        torch.testing.assert_close(intended, torch.view_as_real(weight.detach()) - before, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_it_is_not_rounded_to_the_type_of_the_weight(dtype):
    """A weight of 1 moved by 1e-4: nothing sticks, but the intention is there."""
    weight = torch.nn.Parameter(torch.ones(8, dtype=dtype))
    optimizer = torch.optim.AdamW([weight], lr=1e-5, weight_decay=0.0)
    before = weight.detach().clone()
    weight.grad = torch.full_like(weight, 0.5)
    optimizer.step()
    assert torch.equal(weight, before)
    intended = intended_update(optimizer, weight, before, optimizer.param_groups[0])
    assert intended.dtype == torch.float32
    torch.testing.assert_close(intended, torch.full((8,), -1e-5), rtol=0.01, atol=0)


def test_a_fused_optimizer_kept_from_its_first_step_meant_nothing_of_its_own():
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.Adam([weight], lr=0.1, fused=True)
    weight.grad = torch.full_like(weight, torch.inf)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert optimizer.state[weight]["step"] == 0
    intended = intended_update(optimizer, weight, weight.detach().clone(), optimizer.param_groups[0])
    assert torch.equal(intended, weight.grad)


def test_sparse_gradients():
    table = torch.nn.Embedding(6, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.5)
    table(torch.tensor([1, 1, 4])).sum().backward()
    before = table.weight.detach().clone()
    optimizer.step()
    intended = intended_update(optimizer, table.weight, before, optimizer.param_groups[0])
    assert intended[:, 0].tolist() == [0.0, -1.0, 0.0, 0.0, -0.5, 0.0]


def test_unknown_optimizers_fall_back_to_the_gradient():
    class Mine(torch.optim.SGD):
        pass

    for kind in (torch.optim.RMSprop, Mine):
        weight = torch.nn.Parameter(torch.ones(3))
        optimizer = kind([weight], lr=0.1)
        weight.grad = torch.tensor([0.0, 1.0, 2.0])
        optimizer.step()
        assert intention_of(optimizer) == "gradient"
        intended = intended_update(optimizer, weight, torch.ones(3), optimizer.param_groups[0])
        assert (intended != 0).tolist() == [False, True, True]
