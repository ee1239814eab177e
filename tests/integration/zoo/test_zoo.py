"""Trainings of the zoo whose libraries the tests have anyway; `make zoo` runs all of them."""

import pytest

from benchmarks.zoo import run as zoo

#: Nothing but requirements/dev.txt, and quick.
QUICK = (
    "accelerate_launch",
    "ddp_torchrun",
    "fsdp2_torchrun",
    "hf_llama_bf16_checkpointing",
    "hf_trainer_gpt2",
    "lightning_autoencoder",
    "muon_nanogpt",
    "torchmetrics_lstm",
)
FINDING = {"code": "PD501", "severity": "error", "place": "Net#0 fc update", "title": "updates are lost"}
JUDGEMENT = {"script": "net", "code": "PD501", "place": "Net#0 fc update", "true": True, "why": "pure BF16"}


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_healthy_training_is_recorded_unchanged_and_without_a_finding(name, tmp_path, monkeypatch):
    monkeypatch.setenv("QUICK_TORCH", "")  # the libraries import what they import anywhere
    (training,) = zoo.load(f"^{name}$")
    if training.version is None:
        pytest.skip(f"{training.library} is not installed")

    result = zoo.measure(training, tmp_path)

    assert "broken" not in result, result["broken"]
    assert result["status"] == [0, 0, 0], result["stderr"]
    assert result["deterministic"] and result["equal"] and result["digests"]
    assert result["findings"] == []
    assert result["notes"] == []
    assert result["run"]["complete"] and result["run"]["steps"] > 20


def result(**changed):
    told = {"about": "a net", "library": "torch", "version": "2", "status": [0, 0, 0], "seconds": [2, 3, 2]}
    same = {"deterministic": True, "equal": True, "digests": True, "findings": [], "notes": [], "run": {"steps": 9}}
    return {**told, **same, **changed}


def test_the_page_marks_what_recording_changed():
    page = zoo.page({"net": result(equal=False), "cut": result(status=[0, None, 0])}, {})

    assert "| `net`: a net | torch 2 | **changed** | equal | 9 | none | 1.50 |" in page
    assert "| `cut`: a net | torch 2 | equal | **0 → time limit** |" in page


def test_the_page_keeps_judgements_and_marks_a_finding_that_nobody_judged():
    moved = {**FINDING, "place": "Net#0 head update"}
    page = zoo.page({"net": result(findings=[FINDING, moved])}, {"finding": [JUDGEMENT]})

    assert "| `net` | PD501 | error | `Net#0 fc update` | updates are lost | true | pure BF16 |" in page
    assert "| `net` | PD501 | error | `Net#0 head update` | updates are lost | **unjudged** |  |" in page
    assert "findings unjudged: 1" in page


def test_the_page_lists_a_script_that_fails_by_itself_apart():
    page = zoo.page({"net": {"about": "a net", "broken": "fails by itself, status 1: no"}}, {"absent": {"dgl": "old"}})

    assert "| `net`" not in page
    assert "- dgl: old\n- `net`: fails by itself, status 1: no" in page


def test_every_judgement_is_about_a_script_that_is_there():
    table = zoo.judgements()
    names = {training.name for training in zoo.load()}

    assert [j["script"] for j in table.get("finding", []) if j["script"] not in names] == []
    assert all(j["why"] for j in table.get("finding", []))
