"""Which modules and calls have rows, under which names."""

from __future__ import annotations

import json

import pytest

import precdoctor
from tests.support.processes import record, script, warm


def sites(rows, kind):
    chosen = rows[rows["kind"] == kind]
    return set(zip(chosen["module"], chosen["name"], chosen["call"], strict=True))


def test_keyword_only_calls_and_dataclass_outputs(zoo):
    rows = zoo.rows("gpt", step=1, root="GPT#0")
    assert {("head", "", 0), ("", "loss", 0), ("blocks.1.mlp.2", "", 0)} <= sites(rows, "output")
    assert ("", "logits", 0) not in sites(rows, "output")  # the tensor that the head returned


def test_a_parent_that_returns_its_childs_tensor_adds_nothing(zoo):
    rows = zoo.rows("gpt", step=1)
    outputs = sites(rows, "output")
    assert ("blocks.0.mlp.3", "", 0) in outputs and ("blocks.0.mlp", "", 0) not in outputs
    assert sites(rows, "grad_output") <= outputs


def test_tied_weights_have_one_row_under_the_first_name(zoo):
    rows = zoo.rows("gpt", step=1)
    for kind in ("weight", "weight_grad", "weight_grad_step", "update"):
        assert ("tokens", "weight", 0) in sites(rows, kind)
        assert ("head", "weight", 0) not in sites(rows, kind)
        assert ("", "positions", 0) in sites(rows, kind)
    (root,) = zoo.run("gpt").ranks[0].facts["roots"]
    tied = {p["module"]: p["tied"] for p in root["parameters"] if "tied" in p}
    assert tied == {"tokens": ["head.weight"]}


def test_inputs_made_by_functional_code_are_recorded_and_nothing_twice(zoo):
    rows = zoo.rows("odd_outputs", step=1)
    assert sites(rows, "batch") == {("", "0", 0)}
    # relu_ between the calls, exp before the norm; the halves are views of what split was given
    assert sites(rows, "input") == {("shared", "0", 1), ("shared", "0", 2), ("split", "0", 0), ("norm", "0", 0)}


def test_a_module_called_three_times_has_three_calls(zoo):
    rows = zoo.rows("odd_outputs", step=1)
    for kind in ("output", "grad_output"):
        assert {("shared", "", 0), ("shared", "", 1), ("shared", "", 2)} <= sites(rows, kind)
    order = rows[(rows["kind"] == "grad_output") & (rows["module"] == "shared")].sort_values("order")
    assert order["call"].tolist() == [2, 1, 0]  # backward goes the other way


def test_dict_tuple_and_view_outputs(zoo):
    rows = zoo.rows("odd_outputs", step=1)
    assert {("split", "left", 0), ("split", "right", 0), ("", "0", 0), ("", "1.aux", 0)} <= sites(rows, "output")
    assert ("Sigmoid", "", 0) in sites(rows, "output")  # made anew in each forward, outside the tree


def test_a_long_loop_over_a_cell_numbers_its_calls(zoo):
    rows = zoo.rows("recurrent", step=1, module="cell", kind="output")
    assert set(rows["call"]) == set(range(16)) and set(rows["name"]) == {"0", "1"}
    assert set(rows[rows["call"] < 15]["numel"]) == {4 * 20}
    assert set(rows[rows["call"] == 15]["numel"]) == {3 * 4 * 20}  # the sixteenth and all later ones
    assert {("lstm", "0", 0), ("lstm", "1.0", 0), ("lstm", "1.1", 0)} <= sites(zoo.rows("recurrent", step=1), "output")
    assert {f"weight_hh_l{i}" for i in range(2)} <= set(zoo.rows("recurrent", kind="update", module="lstm")["name"])


def test_sparse_gradients_count_the_rows_they_hold(zoo):
    (row,) = zoo.rows("recurrent", step=1, module="embed", kind="weight_grad_step").to_dict("records")
    assert list(row["shape"]) == [30, 16] and 0 < row["numel"] <= 30 * 16
    (update,) = zoo.rows("recurrent", step=1, module="embed", kind="update").to_dict("records")
    assert update["numel"] == 30 * 16 and update["zero"] >= 480 - row["numel"] and update["unchanged"] <= 4


def test_evaluation_passes_are_not_mixed_in(zoo):
    """The evaluation adds 10^6 to everything its loss module sees, and runs before training, too."""
    rows = zoo.rows("evaluations")
    assert rows[rows["kind"].isin(["output", "input", "batch", "loss"])]["amax"].max() < 1e4
    for step in range(3):
        one = zoo.rows("evaluations", step=step)
        assert set(one["call"]) == {0} and set(one["phase"]) == {"train"}
        (stem,) = one[(one["kind"] == "output") & (one["module"] == "stem.0")].to_dict("records")
        assert stem["numel"] == 4 * 8 * 6 * 6
    assert len(zoo.steps("evaluations")) == 3
    assert set(zoo.rows("encoder")["phase"]) == {"train"}
    buffers = zoo.rows("evaluations", kind="buffer")
    assert buffers.empty or set(buffers["name"]) <= {"running_mean", "running_var"}


def test_no_grad_forwards_inside_training_are_marked(zoo):
    rows = zoo.rows("distillation", step=1)
    teacher = rows[(rows["root"] == "Teacher#0") & (rows["kind"] == "output")]
    assert teacher["phase"].tolist() == ["no_grad"]
    inner = rows[(rows["root"] == "Student#0") & (rows["kind"] == "output")].set_index("module")["phase"]
    assert inner.to_dict() == {"encoder.0": "no_grad", "encoder.1": "no_grad", "frozen": "train", "out": "train"}


def test_frozen_weights_are_recorded_once(zoo):
    weights = zoo.rows("distillation", kind="weight")
    frozen = weights[(weights["module"] == "frozen") | (weights["root"] == "Teacher#0")]
    counts = frozen.groupby(["root", "module", "name"], observed=True).size()
    assert counts[counts.index.get_level_values("module") == "frozen"].tolist() == [1, 1]
    (row, _) = frozen[frozen["module"] == "frozen"].to_dict("records")
    assert row["numel"] in (64, 8)
    trained = weights[weights["module"] == "out"]
    assert trained.groupby("name", observed=True).size().tolist() == [3, 3]
    assert "frozen" not in set(zoo.rows("distillation", kind="update")["module"])


def test_parts_of_a_model_called_one_by_one_belong_to_it(zoo):
    rows = zoo.rows("submodules", step=1)
    assert set(rows["root"]) == {"CNN#0", "MSELoss#0", ""}
    train = rows[rows["phase"] == "train"]
    assert ("head.2", "", 0) in sites(train, "output") and ("head", "0", 0) in sites(train, "input")
    assert set(rows[rows["phase"] == "no_grad"]["call"]) == {1}  # numbered after the training call
    assert len(zoo.steps("submodules")) == 3


def test_an_exception_in_forward_leaves_later_calls_where_they_were(zoo):
    rows = zoo.rows("caught_exception", step=1)
    assert set(rows[rows["kind"] == "grad_output"]["module"]) == {"0.0", "0.1"}
    assert set(rows[rows["kind"] == "output"]["call"]) == {0, 1}
    assert set(rows["root"]) == {"Sequential#0", ""}


def test_an_adapter_added_after_the_first_step_gets_its_name(zoo):
    rows = zoo.rows("late_adapter", step=2)
    assert {"base", "base.base", "base.up", "base.down"} >= set(rows[rows["kind"] == "output"]["module"])
    assert {("base.up", "weight", 0), ("base.down", "weight", 0)} == sites(rows, "weight_grad")
    assert {("base.up", "weight", 0), ("base.down", "weight", 0)} == sites(rows, "update")


def test_functional_transforms_are_left_alone(zoo):
    rows = zoo.rows("functional_loss", step=1)
    assert {("0", "weight", 0), ("2", "bias", 0)} <= sites(rows, "weight_grad")
    assert zoo.steps("functional_loss")["micro_steps"].tolist() == [1, 1, 1]


def test_a_gradient_penalty_counts_the_backward_pass_of_the_step_only(zoo):
    rows = zoo.rows("gradient_penalty", step=1)
    assert zoo.steps("gradient_penalty")["micro_steps"].tolist() == [1, 1, 1]
    assert sites(rows, "batch") == {("", "0", 0)}
    assert ("0", "", 0) in sites(rows, "grad_output")


def test_a_compiled_model_is_seen_at_its_boundary(zoo):
    rows = zoo.rows("gpt_compiled", step=1)
    plain = zoo.rows("gpt", step=1)
    assert sites(rows, "output") == {("", "logits", 0), ("", "loss", 0)}
    assert set(rows[rows["kind"] == "output"]["module_class"]) == {"GPT"}
    assert set(rows["root"]) == {"GPT#0", ""}
    for kind in ("weight", "weight_grad", "weight_grad_step", "update"):
        assert sites(rows, kind) == sites(plain, kind), kind
    prints = [r[r["kind"] == "weight"].set_index(["module", "name"])["fingerprint"].to_dict() for r in (rows, plain)]
    assert prints[0] == prints[1]


def test_rank_json_describes_roots_optimizers_and_scalers(zoo):
    facts = zoo.run("gpt_fp16_scaler").ranks[0].facts
    (root,) = facts["roots"]
    assert root["name"] == "GPT#0" and root["class"] == "GPT"
    assert {"name": "blocks.1.mlp", "class": "Sequential"} in root["modules"]
    assert {
        "name": "weight", "module": "tokens", "shape": [48, 32], "dtype": "float32", "requires_grad": True,
        "tied": ["head.weight"], "group": [0, 0],
    } in root["parameters"]  # fmt: skip
    (optimizer,) = facts["optimizers"]
    assert (optimizer["class"], optimizer["package"], optimizer["intended_update"]) == ("AdamW", "torch", "exact")
    assert optimizer["groups"][0]["lr"] == 1e-3
    (scaler,) = facts["scalers"]
    assert scaler["init_scale"] == 1024.0 and scaler["growth_interval"] == 3
    assert json.dumps(facts["autocast"]) == '["cpu:float16"]'


def test_complex_tensors_have_the_rows_that_others_have(zoo):
    rows = zoo.rows("spectral", step=1, dtype="complex64")
    for kind in ("weight", "weight_grad", "weight_grad_step", "update"):
        assert sites(rows, kind) == {("", "mix", 0)}
    (buffer,) = zoo.rows("spectral", step=0, kind="buffer").to_dict("records")
    assert (buffer["name"], list(buffer["shape"]), buffer["numel"]) == ("turn", [6], 12)
    state = zoo.rows("spectral", kind="opt_state", dtype="complex64")
    assert set(state["name"]) == {"mix.exp_avg", "mix.exp_avg_sq"}
    (update,) = rows[rows["kind"] == "update"].to_dict("records")
    assert update["numel"] == 2 * 4 * 4 * 6 and update["unchanged"] == 0
    assert 0.005 < update["amax"] < 0.02  # Adam moves each part by its rate


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("inside", [True, False])
def test_weights_under_no_grad_are_noted_unless_their_module_is_in_evaluation_mode(tmp_path, mode, inside):
    script(
        tmp_path,
        "encoder.py",
        f"""
        import torch
        from torch import nn
        torch.manual_seed(0)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.encoder = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
                self.head = nn.Linear(8, 1)
            def forward(self, x):
                with torch.no_grad():
                    hidden = self.encoder(x)
                return self.head(hidden)
        net = Net()
        net.encoder.{mode}()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(16):
            x = torch.randn(32, 4)
            if {inside}:
                y = net(x)
            else:
                with torch.no_grad():
                    hidden = net.encoder(x)
                y = net.head(hidden)
            optimizer.zero_grad()
            (y - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
        """,
    )
    run = precdoctor.open_run(record(tmp_path, "--", *warm("encoder.py")).run)
    found = [f for f in precdoctor.diagnose(run).findings if f.code == "PD203"]
    assert [f.severity.value for f in found] == (["info"] if mode == "train" else [])
    if found:
        assert found[0].evidence["under_no_grad"] and len(found[0].evidence["weights"]) == 2
