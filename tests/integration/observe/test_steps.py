"""The steps table: losses, rates, scales, skips."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import precdoctor
from tests.support.processes import record, script, warm


def test_losses_are_those_of_the_script(zoo):
    for name in ("gpt", "gpt_bf16_autocast", "recurrent", "gradient_penalty", "odd_outputs", "hand_scaled", "warm_up"):
        assert zoo.steps(name)["loss"].tolist() == pytest.approx(zoo.plain[name]["losses"], rel=1e-6), name


def test_learning_rates_follow_the_scheduler(zoo):
    rates = [1e-3 * min(1.0, step / 10) for step in range(16)]
    assert zoo.steps("warm_up")["lr"].tolist() == pytest.approx(rates)
    assert [list(lrs) for lrs in zoo.steps("warm_up")["lrs"]] == [[pytest.approx(rate)] for rate in rates]


def test_a_forced_overflow_is_skipped_and_the_scale_backs_off(zoo):
    steps = zoo.steps("gpt_fp16_scaler")
    assert steps["found_inf"].tolist() == steps["skipped"].tolist() == [False, False, True, False, False]
    assert steps["loss_scale"].tolist() == [1024.0, 1024.0, 1024.0, 512.0, 512.0]
    assert steps["growth_tracker"].tolist() == [0, 1, 2, 0, 1]
    assert steps["clipped_before_unscale"].tolist() == [False] * 5
    assert steps["loss"].tolist() == pytest.approx(zoo.plain["gpt_fp16_scaler"]["losses"], rel=1e-5)
    assert set(steps["autocast_dtype"]) == {"float16"}
    assert (steps["non_finite"] > 0).tolist() == [False, False, True, False, False]
    assert [(e["step"], e["change"], e["to"]) for e in zoo.events("gpt_fp16_scaler", "scaler")] == [
        (3, "backoff", 512.0)
    ]
    rows = zoo.rows("gpt_fp16_scaler")
    scaled = rows["kind"].isin(["grad_output", "weight_grad", "loss"])
    assert (rows[scaled]["scale"] == rows[scaled]["step"].map(steps["loss_scale"])).all()
    assert rows[~scaled]["scale"].isna().all()  # unscaled by hand before the clip
    assert set(rows[rows["step"] == 2]["kind"]) & {"update", "weight_grad_step"} == set()


def test_a_fused_optimizer_is_given_scaled_gradients_and_skips_by_itself(zoo):
    steps = zoo.steps("gpt_fused_scaler")
    assert steps["found_inf"].tolist() == steps["skipped"].tolist() == [False, True, False]
    given = zoo.rows("gpt_fused_scaler", kind="weight_grad_step", step=0)
    assert set(given["scale"]) == {1024.0}
    local = zoo.rows("gpt_fused_scaler", kind="weight_grad", step=0)
    largest = [rows.set_index(["module", "name"])["amax"].to_dict() for rows in (given, local)]
    assert largest[0] == largest[1]
    assert set(zoo.rows("gpt_fused_scaler", kind="update")["step"]) == {0, 2}  # nothing was meant on step 1


def test_gradient_norms_are_unscaled(zoo):
    steps = zoo.steps("gpt_fp16_scaler")
    assert 0.1 < steps.loc[0, "grad_norm"] < 100
    assert math.isnan(steps.loc[2, "grad_norm"])


def test_a_hand_written_scale_is_inferred(zoo):
    steps = zoo.steps("hand_scaled")
    assert set(steps["loss_scale"]) == {65536.0}
    rows = zoo.rows("hand_scaled", step=1)
    by_kind = dict(iter(rows.groupby("kind", observed=True)))
    assert set(by_kind["weight_grad"]["scale"]) == set(by_kind["loss"]["scale"]) == {65536.0}
    assert by_kind["weight_grad_step"]["scale"].isna().all()
    ratio = (
        by_kind["weight_grad"].set_index(["module", "name"])["amax"]
        / by_kind["weight_grad_step"].set_index(["module", "name"])["amax"]
    )
    assert np.allclose(ratio, 65536.0)
    assert [e["change"] for e in zoo.events("hand_scaled", "scaler")] == ["inferred"]


@pytest.mark.parametrize(
    ("gradients", "clips", "limits"),
    [
        ("loss.backward()", "nn.utils.clip_grad_norm_(model.parameters(), 0.01)", [0.01, 0.01]),
        ("by_hand(loss)", "nn.utils.clip_grad_norm_(model.parameters(), 0.01, float('inf'))", [0.01, 0.01]),
        (
            "loss.backward()",
            "for i, layer in enumerate(model): nn.utils.clip_grad_norm_(layer.parameters(), 0.01 + 0.01 * i)",
            [0.01, 0.03],
        ),
        ("by_hand(loss)", "nn.utils.clip_grad_norm_(model[0].parameters(), 0.01)", [0.01, None]),
        ("loss.backward()", "", [None, None]),
    ],
    ids=["together", "by-largest", "each", "one", "none"],
)
@pytest.mark.parametrize("optimizers", [1, 2])
def test_each_optimizer_has_the_norm_of_its_own_gradients_from_before_a_clip(
    tmp_path, clips, limits, gradients, optimizers
):
    script(
        tmp_path,
        "two.py",
        f"""
        import json, torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        parts = [model] if {optimizers} == 1 else [model[0], model[2]]
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in parts]
        def by_hand(loss):
            for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters()))):
                p.grad = g
        norms = []
        for _ in range(9):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model(torch.randn(4, 8)).square().mean()
            {gradients}
            norms += [torch.cat([p.grad.flatten() for p in part.parameters()]).norm().item() for part in parts]
            {clips}
            for optimizer in optimizers:
                optimizer.step()
        json.dump(norms, open("norms.json", "w"))
        """,
    )
    steps = precdoctor.open_run(record(tmp_path, "--every", "8", "--", *warm("two.py")).run).steps()
    norms = json.loads((tmp_path / "norms.json").read_text())
    assert steps["grad_norm"].tolist() == pytest.approx(norms, rel=1e-3)
    if optimizers == 2:
        assert [None if np.isnan(limit) else limit for limit in steps["clip_norm"]] == limits * 9
    assert not steps["sampled"].all()


@pytest.mark.parametrize(
    ("first", "divide", "early"),
    [("clip", "p.grad", True), ("divide", "p.grad", False), ("divide", "p.grad.data", False)],
)
@pytest.mark.parametrize(
    ("scale", "backward"),
    [
        (1024.0, "(loss * 1024).backward()"),
        (1000.0, "(loss * 1000).backward()"),
        (1024.0, "loss.backward(torch.tensor(1024.0))"),
    ],
)
def test_norms_of_gradients_scaled_by_hand_are_unscaled_on_all_steps(tmp_path, first, divide, early, scale, backward):
    script(
        tmp_path,
        "by_hand.py",
        f"""
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        x, y = torch.randn(64, 8), 3 * torch.randn(64, 1)
        def divide():
            for p in model.parameters():
                {divide}.div_({scale})
        for _ in range(9):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            {backward}
            {"divide()" if first == "divide" else ""}
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            {"divide()" if first == "clip" else ""}
            optimizer.step()
        """,
    )
    run = precdoctor.open_run(record(tmp_path, "--every", "4", "--", *warm("by_hand.py")).run)
    steps = run.steps()
    assert steps["sampled"].tolist() == [step % 4 == 0 for step in range(9)]
    assert set(steps["loss_scale"]) == {scale}
    losses = run.tensors(filters=[("kind", "==", "loss")])
    assert set(losses["scale"]) == {1.0 if "tensor" in backward else scale}
    assert steps[steps["sampled"]]["loss"].tolist() == pytest.approx((losses["amax"] / losses["scale"]).tolist())
    norms = steps["grad_norm"]
    assert norms.min() > 1.0, "the clip takes effect in either order"
    assert norms.max() < 1.1 * norms.min()
    known = steps[steps["sampled"]]["clipped_before_unscale"]
    assert known.tolist() == [early] * 3 and steps[~steps["sampled"]]["clipped_before_unscale"].isna().all()
    found = [f for f in precdoctor.diagnose(run).findings if f.code == "PD306"]
    assert len(found) == early
    if early:
        assert found[0].evidence["effective_clip_norm"] == 1.0 / scale
        assert "scaler" not in found[0].prescriptions[0].snippet


@pytest.mark.parametrize("name", ["weighted_loss", "gpt_accumulate", "gan", "distillation", "evaluations"])
def test_other_factors_are_not_taken_for_a_scale(zoo, name):
    assert zoo.steps(name)["loss_scale"].isna().all()
    assert zoo.events(name, "scaler") == []


def test_two_optimizers_take_turns(zoo):
    steps = zoo.steps("gan")
    assert steps["optimizer"].tolist() == ["Adam#0", "Adam#1"] * 3
    assert steps["micro_steps"].tolist() == [2, 1] * 3
    losses = np.reshape(zoo.plain["gan"]["losses"], (3, 3))
    assert steps["loss"].tolist() == pytest.approx(np.stack([losses[:, 0] + losses[:, 1], losses[:, 2]], 1).ravel())
    own = zoo.rows("gan", step=1, kind="weight_grad", root="Generator#0")
    assert steps.loc[1, "grad_norm"] == pytest.approx(math.sqrt(own["sum_sq"].sum()))  # not the discriminator's
    assert set(zoo.rows("gan", step=1, kind="weight")["root"]) == {"Generator#0"}
    assert set(zoo.rows("gan", step=0, kind="weight")["root"]) == {"Discriminator#0"}


def test_a_closure_runs_inside_the_step_it_belongs_to(zoo):
    """Gradients left over from the step before are not what the optimizer is given."""
    steps = zoo.steps("closure_adam")
    assert steps["micro_steps"].tolist() == [1, 1, 1]
    assert steps["loss"].tolist() == pytest.approx(zoo.plain["closure_adam"]["losses"])
    for step in range(3):
        given = zoo.rows("closure_adam", step=step, kind="weight_grad_step")
        assert math.sqrt(given["sum_sq"].sum()) == pytest.approx(0.01, rel=1e-3)
        assert len(zoo.rows("closure_adam", step=step, kind="update")) == 4
    assert (zoo.steps("lbfgs")["micro_steps"] >= 1).all()
    assert len(zoo.steps("lbfgs")) == 3


def test_updates_of_an_optimizer_that_clears_gradients_within_its_step(zoo):
    updates = zoo.rows("cleared_in_step", step=1, kind="update")
    assert len(updates) == 4 and (updates["unchanged"] == 0).all()
    assert updates["amax"].tolist() == pytest.approx([0.01] * 4, rel=1e-4)


def test_the_lost_update_fraction_is_small_in_fp32_and_zero_weight_changes_at_lr_zero_are_not_lost(zoo):
    assert zoo.steps("gpt")["lost_update_fraction"].max() < 0.05
    first = zoo.rows("warm_up", step=0, kind="update")
    assert (first["unchanged"] == 0).all() and (first["zero"] == first["numel"]).all()


@pytest.mark.parametrize("there", ["trial = None", ""])
def test_a_backward_pass_that_updates_nothing_does_not_hold_up_steps_without_an_optimizer(tmp_path, there):
    script(
        tmp_path,
        "by_hand.py",
        f"""
        import torch
        x = torch.linspace(-1, 1, 16)
        trial = torch.ones(2, requires_grad=True)
        (trial[0] * x + trial[1]).square().mean().backward()
        {there}
        weights = torch.ones(2, requires_grad=True)
        for _ in range(6):
            weights.grad = None
            (weights[0] * x + weights[1]).square().mean().backward()
            with torch.no_grad():
                weights -= 0.1 * weights.grad
        """,
    )
    done = record(tmp_path, "--", *warm("by_hand.py"))
    assert done.status == 0, done.err
    assert precdoctor.open_run(done.run).steps()["step"].tolist() == list(range(6))


def test_buffers_of_a_script_without_an_optimizer_are_recorded_once_a_step(tmp_path):
    script(
        tmp_path,
        "poisoned.py",
        """
        import torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        model[0].bias.requires_grad_(False)
        for i in range(12):
            x = torch.randn(8, 4)
            if i == 5:
                x[0, 0] = float("inf")
            for half in (x[:4], x[4:]):
                loss = model(half).square().mean()
                if loss.isfinite():
                    loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p -= 0.01 * p.grad
                        p.grad = None
        """,
    )
    run = precdoctor.open_run(record(tmp_path, "--", *warm("poisoned.py")).run)
    rows = run.tensors()
    buffers = rows[rows["kind"] == "buffer"].set_index(["name", "step"]).sort_index()
    for name in ("running_mean", "running_var"):
        assert buffers.loc[name].index.tolist() == list(range(12))
        assert set(buffers.loc[name]["numel"]) == {8}
    assert (buffers.loc["running_var"]["nan"] > 0).tolist() == [False] * 5 + [True] * 7
    assert rows[(rows["kind"] == "weight") & (rows["module"] == "0") & (rows["name"] == "bias")]["step"].tolist() == [0]
    [finding] = [f for f in precdoctor.diagnose(run.path).findings if f.code in ("PD101", "PD104", "PD106")]
    assert "running_mean" in finding.title + finding.message and finding.evidence["last_finite_step"] == 4


def test_steps_without_an_optimizer_end_when_the_weights_were_updated(zoo):
    steps = zoo.steps("no_optimizer")
    assert steps["loss"].tolist() == pytest.approx(zoo.plain["no_optimizer"]["losses"], rel=1e-6)
    assert steps["micro_steps"].tolist() == [2, 2, 2, 2]
    assert steps["complete"].all()
    assert set(steps["optimizer"]) == {""}
    rows = zoo.rows("no_optimizer")
    weights = rows[(rows["kind"] == "weight") & (rows["name"] == "weight") & (rows["module"] == "0")]
    assert weights["step"].tolist() == [0, 1, 2, 3]
    assert weights["numel"].tolist() == [128] * 4
    assert weights["fingerprint"].nunique() == 4
    updates = rows[rows["kind"] == "update"].set_index(["step", "module", "name"])["amax"]
    gradients = rows[rows["kind"] == "weight_grad"].set_index(["step", "module", "name"])["amax"]
    assert sorted(set(updates.index.get_level_values("step"))) == [1, 2, 3], "the first one might be an optimizer's"
    assert len(updates) == 3 * 4
    assert updates.tolist() == pytest.approx((0.1 * gradients.reindex(updates.index)).tolist(), rel=1e-3)


def test_a_step_that_raised_does_not_swallow_those_of_other_optimizers(tmp_path):
    script(
        tmp_path,
        "raises.py",
        """
        import torch

        class Fails(torch.optim.SGD):
            def step(self, closure=None):
                raise ArithmeticError("no step today")

        class Nested(torch.optim.SGD):
            def step(self, closure=None):
                super().step()  # with the hooks of its own class, as an SGD exists

        class Drives(torch.optim.Optimizer):  # an outer optimizer: its inner one's step is no attempt of its own
            def __init__(self, inner):
                super().__init__([p for group in inner.param_groups for p in group["params"]], {})
                self.inner = inner

            def step(self, closure=None):
                self.inner.step()

        net = torch.nn.Linear(8, 1)
        fails = Fails(net.parameters(), lr=0.1)
        optimizers = [c(net.parameters(), lr=0.1) for c in (torch.optim.SGD, torch.optim.Adam, Nested)]
        optimizers[1] = Drives(optimizers[1])
        for step in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
                net(torch.ones(4, 8)).square().mean().backward()
                if step == 2:
                    try:
                        fails.step()
                    except ArithmeticError:
                        pass
                optimizer.step()
        """,
    )
    done = record(tmp_path, "--", *warm("raises.py"))
    assert done.status == 0, done.err
    names = ["SGD#0", "Drives#0", "Nested#0"]
    failing = [one for name in names for one in ("Fails#0", name)]
    run = precdoctor.open_run(done.run)
    assert run.steps()["optimizer"].tolist() == 2 * names + failing + 3 * names
    rows = run.tensors()
    updates = rows[rows["kind"] == "update"].groupby("step").size()
    assert updates.to_dict() == {i: 2 for i, name in enumerate(run.steps()["optimizer"]) if name != "Fails#0"}


def test_what_follows_a_step_that_raised_belongs_to_the_next_step(tmp_path):
    script(
        tmp_path,
        "raises.py",
        """
        import torch

        class Fails(torch.optim.SGD):
            def step(self, closure=None):
                self.steps = getattr(self, "steps", 0) + 1
                if self.steps == 3:
                    raise ArithmeticError("no step today")
                return super().step(closure)

        net = torch.nn.Linear(8, 1)
        optimizer = Fails(net.parameters(), lr=0.1)
        for step in range(5):
            optimizer.zero_grad()
            net(torch.ones(4, 8)).square().mean().backward()
            try:
                optimizer.step()
            except ArithmeticError:
                pass
        """,
    )
    done = record(tmp_path, "--", *warm("raises.py"))
    run = precdoctor.open_run(done.run)
    steps, rows = run.steps(), run.tensors()

    assert steps["micro_steps"].tolist() == [1] * 5
    assert steps["loss"].notna().all()
    assert rows[rows["kind"] == "update"].groupby("step").size().to_dict() == dict.fromkeys((0, 1, 3, 4), 2)


def test_every_step_has_the_norm_of_what_its_optimizer_was_given(tmp_path):
    # ... also sampled steps without rows of these gradients: they came in a step before, or in no backward pass
    script(
        tmp_path,
        "norms.py",
        """
        import torch

        net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
        first = torch.optim.Adam(net[0].parameters())
        second = torch.optim.SGD(net[1].parameters(), lr=0.1)
        for step in range(2):
            loss = net(torch.ones(4, 8)).square().mean()
            if step == 0:
                loss.backward()
            else:
                for p, gradient in zip(net.parameters(), torch.autograd.grad(loss, list(net.parameters()))):
                    p.grad = gradient
            for optimizer in (first, second):
                print(torch.nn.utils.get_total_norm([p.grad for p in optimizer.param_groups[0]["params"]]).item())
                optimizer.step()
        """,
    )
    done = record(tmp_path, "--every", "1", "--", *warm("norms.py"))
    norms = precdoctor.open_run(done.run).steps()["grad_norm"]

    assert norms.tolist() == pytest.approx([float(line) for line in done.out.split()], rel=1e-5)


IN_BACKWARD = """
import math, sys
import torch

class Root(torch.nn.Module):
    def forward(self, x):
        return torch.sqrt(x)

torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Softplus(), Root(), torch.nn.Linear(4, 1))
optimizers = {p: torch.optim.SGD([p], 1e-2) for p in net.parameters()}
squares = []

def step_now(p):
    squares.append(p.grad.double().square().sum().item())
    optimizers[p].step()
    p.grad = None

for p in net.parameters():
    p.register_post_accumulate_grad_hook(step_now)
for step in range(3):
    squares.clear()
    x = torch.ones(4, 8)
    if step == 1 and "sick" in sys.argv:
        with torch.no_grad():
            net[0].bias -= 1000  # what softplus makes of it is 0, where the root has no derivative
    net(x).square().mean().backward()
    optimizers[net[0].weight].step()  # finds nothing left to do
    print(math.sqrt(sum(squares)))
"""


@pytest.mark.parametrize("options", [("--every", "1"), ("--every", "1024"), ("--exclude", "3")])
def test_optimizers_that_step_in_one_backward_pass_make_one_step(tmp_path, options):
    script(tmp_path, "hooks.py", IN_BACKWARD)
    done = record(tmp_path, *options, "--", *warm("hooks.py"))
    run = precdoctor.open_run(done.run)
    steps, rows = run.steps(), run.tensors()

    assert steps["optimizer"].tolist() == ["SGD#0"] * 3
    assert steps["complete"].all() and steps["micro_steps"].tolist() == [1] * 3
    assert [len(rates) for rates in steps["lrs"]] == [4] * 3
    assert steps["grad_norm"].tolist() == pytest.approx([float(line) for line in done.out.split()], rel=1e-6)
    first = rows[rows["step"] == 0].groupby("kind", observed=True).size()
    weights = 2 if "--exclude" in options else 4
    assert [first[k] for k in ("weight", "weight_grad", "weight_grad_step", "update")] == [weights] * 4


@pytest.mark.parametrize("policy", ["examine", "skip", "stop"])
def test_a_gradient_that_is_bad_when_others_have_been_stepped_with_is_led_to_its_op(tmp_path, policy):
    script(tmp_path, "hooks.py", IN_BACKWARD)
    done = record(tmp_path, "--on-nonfinite", policy, "--", *warm("hooks.py", "sick"))
    run = precdoctor.open_run(done.run)
    events = run.events()
    incident = events[events["event"] == "incident"].iloc[0]
    line = 1 + (tmp_path / "hooks.py").read_text().splitlines().index("        return torch.sqrt(x)")

    assert incident["step"] == 1 and json.loads(incident["data"])["outcome"] == "origin"
    assert f"step 1: a gradient is not finite, first made by aten.div.Tensor at hooks.py:{line}" in done.err
    assert run.steps()["skipped"].tolist() == {"examine": [False] * 3, "skip": [False, True, True]}.get(
        policy, [False] * 2
    )
    assert ("have been updated already" in done.err) == (policy == "stop")


@pytest.mark.parametrize("all_at_once", [True, False])
def test_weights_updated_by_hand_in_the_backward_pass_make_a_step_of_it(tmp_path, all_at_once):
    script(
        tmp_path,
        "fused.py",
        """
        import sys
        import torch

        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))

        def update(*_):
            for p in net.parameters():
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-0.01)
                    p.grad = None

        for p in net.parameters():  # LOMO has the one kind, tutorials the other
            (p.register_hook if len(sys.argv) > 1 else p.register_post_accumulate_grad_hook)(update)
        for step in range(4):
            loss = net(torch.randn(4, 8)).square().mean()
            loss.backward()
            update()
            print(loss.item())
        """,
    )
    done = record(tmp_path, "--", *warm("fused.py", *["once"] * all_at_once))
    run = precdoctor.open_run(done.run)
    steps = run.steps()

    assert steps["loss"].tolist() == pytest.approx([float(line) for line in done.out.split()], rel=1e-6)
    assert steps["micro_steps"].tolist() == [1] * 4 and steps["complete"].all()
    assert steps["grad_norm"].isna().all(), "nobody has seen all gradients at once"
    assert run.tensors(filters=[("kind", "==", "weight_grad")]).groupby("step").size().tolist() == [4] * 4


def test_the_climb_before_the_first_step_of_an_optimizer_is_no_step(tmp_path):
    script(
        tmp_path,
        "sam.py",
        """
        import torch

        net = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        x = torch.ones(4, 8)
        for step in range(3):
            net(x).square().mean().backward()
            climb = [0.05 * p.grad / p.grad.norm() for p in net.parameters()]
            with torch.no_grad():
                for p, up in zip(net.parameters(), climb):
                    p += up
            optimizer.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            print(loss.item())
            with torch.no_grad():
                for p, up in zip(net.parameters(), climb):
                    p -= up
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = record(tmp_path, "--", *warm("sam.py"))
    steps = precdoctor.open_run(done.run).steps()

    assert steps["optimizer"].tolist() == ["SGD#0"] * 3
    assert steps["micro_steps"].tolist() == [2] * 3
    assert steps["loss"].tolist() == pytest.approx([float(line) for line in done.out.split()], rel=1e-6)


def test_the_first_step_of_an_optimizer_may_be_the_first_to_call_the_model(tmp_path):
    script(
        tmp_path,
        "closure.py",
        """
        import torch

        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=3)
        x = torch.randn(64, 4)

        def closure():
            optimizer.zero_grad()
            loss = (net(x) - x.sum(-1, keepdim=True)).square().mean()
            loss.backward()
            losses.append(loss.item())
            return loss

        for step in range(2):
            losses = []
            optimizer.step(closure)
            print(losses[-1])
        """,
    )
    done = record(tmp_path, "--", *warm("closure.py"))
    run = precdoctor.open_run(done.run)
    weights = run.tensors(filters=[("kind", "==", "weight")])

    assert run.steps()["loss"].tolist() == pytest.approx([float(line) for line in done.out.split()], rel=1e-6)
    assert weights.groupby("step")["name"].agg(sorted).tolist() == [["bias", "weight"]] * 2
    assert set(weights["root"]) == {"Linear#0"}


def test_weights_that_get_their_gradient_by_hand_have_updates(tmp_path):
    script(
        tmp_path,
        "evolution.py",
        """
        import torch

        net = torch.nn.Linear(8, 1).requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            net(torch.ones(4, 8))
            for p in net.parameters():
                p.grad = torch.randn_like(p)
            optimizer.step()
        """,
    )
    done = record(tmp_path, "--", *warm("evolution.py"))
    rows = precdoctor.open_run(done.run).tensors()

    assert rows[rows["kind"] == "update"].groupby("step").size().tolist() == [2] * 3
    assert rows[rows["kind"] == "weight"].groupby("step").size().tolist() == [2] * 3


def test_what_a_resumed_optimizer_has_done_is_known(tmp_path):
    path = script(
        tmp_path,
        "resumed.py",
        """
        import copy
        import torch

        def trained(make, steps, state=None):
            model = torch.nn.Linear(4, 4)
            optimizer = make(model.parameters(), lr=1e-3)
            if state is not None:
                optimizer.load_state_dict(state)
            for _ in range(steps):
                optimizer.zero_grad()
                model(torch.randn(8, 4)).square().mean().backward()
                optimizer.step()
            return copy.deepcopy(optimizer.state_dict())

        class FromOne(torch.optim.Optimizer):  # like Prodigy of pytorch_optimizer
            def __init__(self, parameters, lr):
                super().__init__(parameters, {"lr": lr, "step": 1})

            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    group["step"] += 1
                    for p in group["params"]:
                        self.state[p]["sum"] = self.state[p].get("sum", 0) + p.grad
                        p -= group["lr"] * self.state[p]["sum"]

        for make in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, FromOne):
            state = trained(make, 5)
            if make is torch.optim.Adam:
                state["state"][0]["step"] = 5  # as old checkpoints have it
            trained(make, 3, state)
        """,
    )
    run = precdoctor.open_run(record(tmp_path, "--", *warm(path)).run)
    before = {o["name"]: o["steps_before"] for o in run.ranks[0].facts["optimizers"]}
    none = dict.fromkeys(("AdamW#0", "SGD#0", "SGD#1", "Adam#0", "FromOne#0"))
    assert before == {**none, "AdamW#1": 5, "Adam#1": 5, "FromOne#1": 5}


def test_the_group_of_each_parameter_is_known_and_what_an_optimizer_holds_for_no_model(tmp_path):
    path = script(
        tmp_path,
        "groups.py",
        """
        import torch

        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3), torch.nn.Linear(3, 2))
        sgd = torch.optim.SGD(net[0].parameters(), lr=0.1)
        masters = [torch.zeros(5, requires_grad=True)]  # with a gradient: of no model, but used
        adam = torch.optim.Adam([{"params": masters + list(net[1].parameters())}, {"params": net[2].parameters()}])
        net[2] = torch.nn.Linear(3, 2)
        for _ in range(3):
            net(torch.randn(8, 4)).square().mean().backward()
            masters[0].grad = torch.ones(5)
            for optimizer in (sgd, adam):
                optimizer.step()
                optimizer.zero_grad()
        """,
    )
    facts = precdoctor.open_run(record(tmp_path, "--", *warm(path)).run).ranks[0].facts
    groups = {f"{p['module']}.{p['name']}": p.get("group") for p in facts["roots"][0]["parameters"]}
    assert groups == {
        "0.weight": [0, 0],
        "0.bias": [0, 0],
        "1.weight": [1, 0],
        "1.bias": [1, 0],
        "2.weight": None,
        "2.bias": None,
    }
    assert [[g.get("unused") for g in o["groups"]] for o in facts["optimizers"]] == [[None], [None, [[2, 3], [2]]]]


def test_a_group_that_is_added_while_the_training_runs_is_known_with_its_settings(tmp_path):
    path = script(
        tmp_path,
        "added.py",
        """
        import torch

        net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 3))
        optimizer = torch.optim.Adam(net[1].parameters())
        for step in range(6):
            if step == 3:
                optimizer.add_param_group({"params": net[0].parameters(), "eps": 0.5})
            net(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    facts = precdoctor.open_run(record(tmp_path, "--", *warm(path)).run).ranks[0].facts
    assert [(g["eps"], g["parameters"]) for g in facts["optimizers"][0]["groups"]] == [(1e-8, 2), (0.5, 2)]
    assert [p.get("group") for p in facts["roots"][0]["parameters"]] == [[0, 1], [0, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("ending", "steps"), [("", 4), ("raise ValueError", 5), ("net(torch.full((4, 8), float('nan')))", 5)]
)
def test_a_model_called_in_training_mode_after_the_last_step_has_begun_no_step(tmp_path, ending, steps):
    """Unless something kept the backward pass from beginning."""
    script(
        tmp_path,
        "evaluates.py",
        f"""
        import torch

        net = torch.nn.Linear(8, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            net(torch.ones(4, 8)).sum().backward()
            optimizer.step()
        net(torch.ones(4, 8))
        {ending}
        """,
    )
    done = record(tmp_path, "--", *warm("evaluates.py"))
    assert len(precdoctor.open_run(done.run).steps()) == steps
