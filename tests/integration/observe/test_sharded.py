"""Optimizers of DeepSpeed and Megatron as stand-ins after named releases, in one process.

``make stacks`` trains with the libraries themselves, on two ranks.
"""

from __future__ import annotations

import pytest

from precdoctor.diagnosis.engine import diagnose
from tests.integration.observe.conftest import Zoo, train

NAMES = ("sharded_zero", "sharded_zero_overflows", "sharded_megatron")


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sharded")
    return Zoo(directory, *train(directory, *NAMES))


@pytest.mark.parametrize("name", NAMES)
def test_no_bit_of_training_changes(sharded, name):
    assert sharded.recorded[name]["digest"] == sharded.plain[name]["digest"] != "failed"


@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_what_the_library_calls_one(sharded, name):
    """It steps the optimizer inside once per group, or not at all."""
    steps = sharded.steps(name)
    assert steps.index.tolist() == list(range(12))
    assert steps["complete"].all() and set(steps["optimizer"]) == {"AdamW#0"}


def test_the_loss_scale_and_what_it_found(sharded):
    zero, high, megatron = (sharded.steps(name) for name in NAMES)
    assert zero["loss_scale"].tolist() == [2.0**12] * 5 + [2.0**13] * 4 + [2.0**14] * 3
    assert not zero["skipped"].any() and (zero["grad_norm"] > 0.1).all()
    assert set(high["loss_scale"]) == {2.0**30}
    assert high["skipped"].all() and high["found_inf"].all()
    overflows = int(megatron["found_inf"].sum())
    assert 0 < overflows < 6 and megatron["skipped"].tolist() == megatron["found_inf"].tolist()
    after = megatron["loss_scale"].shift(-1)[megatron["found_inf"].to_numpy(dtype=bool)]
    assert (after.dropna() == megatron["loss_scale"].loc[after.dropna().index] / 2).all()


@pytest.mark.parametrize("name", ["sharded_zero", "sharded_megatron"])
def test_parts_of_flat_copies_are_called_as_their_weights(sharded, name):
    rows = sharded.rows(name, root="Sequential#0", step=11)
    weights = rows[rows["kind"] == "weight"].set_index(["module", "name"])["numel"].to_dict()
    masters = rows[rows["kind"] == "master_weight"].set_index(["module", "name"])["numel"].to_dict()
    assert len(weights) == 8 and masters.keys() < weights.keys()
    assert all(masters[place] <= weights[place] for place in masters)
    assert sum(masters.values()) * 2 == pytest.approx(sum(weights.values()), abs=2)
    for kind in ("weight_grad_step", "update"):
        assert rows[rows["kind"] == kind].set_index(["module", "name"])["numel"].to_dict() == masters
    states = sharded.rows(name, kind="opt_state", step=0)
    assert {(m, n.partition(".")[0]) for m, n in zip(states["module"], states["name"], strict=True)} == masters.keys()
    assert set(sharded.rows(name)["root"]) == {"Sequential#0", ""}


def test_a_healthy_run_has_no_findings(sharded):
    for name in ("sharded_zero", "sharded_megatron"):
        assert [f.code for f in diagnose(sharded.run(name)).findings] == []


def test_a_static_scale_that_is_too_high_is_found(sharded):
    (finding,) = diagnose(sharded.run("sharded_zero_overflows")).findings
    assert finding.code == "PD307" and "every step overflows" in finding.title
