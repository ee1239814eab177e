"""The recorder is not there: losses and final weights are the same, bit for bit."""

from __future__ import annotations


def test_no_specimen_trains_differently_under_the_recorder(zoo):
    assert len(zoo.plain) >= 30
    assert zoo.plain.keys() == zoo.recorded.keys()
    assert [name for name in zoo.plain if zoo.plain[name] != zoo.recorded[name]] == []


def test_checkpointing_and_compilation_are_the_same_model_so_the_zoo_itself_is_sound(zoo):
    digests = {zoo.plain[name]["digest"] for name in zoo.plain if name in ("gpt", "gpt_checkpoint", "gpt_compiled")}
    assert len(digests) == 1


def test_no_run_holds_internal_errors_drops_or_unfinished_steps(zoo):
    for name in zoo.plain:
        assert zoo.events(name, "error") == [], name
        assert zoo.events(name, "drop") == [], name
        assert zoo.steps(name)["complete"].all(), name
        (rank,) = zoo.run(name).ranks
        assert rank.complete and rank.problems == [], name


def test_keys_of_tensors_rows_are_unique(zoo):
    for name in zoo.plain:
        rows = zoo.rows(name)
        key = ["step", "rank", "root", "module", "kind", "name", "call"]
        assert not rows.duplicated(key).any(), name


def test_execution_order_is_one_sequence_per_step(zoo):
    for name in zoo.plain:
        for _, rows in zoo.rows(name).groupby("step"):
            assert rows["order"].is_unique, name
            first = rows.groupby("kind", observed=True)["order"].min()
            last = rows.groupby("kind", observed=True)["order"].max()
            if name in ("lbfgs", "closure_adam"):  # a closure calls the model within the step
                assert last["weight"] < first["weight_grad_step"], name
                continue
            assert last.get("output", -1) < first["weight"], name
            # the second optimizer of a backward pass has the weights alone
            assert last.get("weight_grad", -1) < first["weight"], name
            if "update" in first and "weight_grad_step" not in first:  # updates by hand: nobody is given gradients
                assert last["weight"] < first["update"], name
            elif "update" in first:
                assert last["weight"] < first["weight_grad_step"] and last["weight_grad_step"] < first["update"], name
