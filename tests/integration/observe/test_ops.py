"""``record --ops`` and ``compare --ops`` on a small Llama: equal runs, other formats, compiled code, planted faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import precdoctor
from precdoctor.cli import main
from precdoctor.comparison.op_compare import compare_ops
from precdoctor.runlog.verify import verify
from tests.integration.observe.conftest import train
from tests.integration.observe.test_deep_scan import TWICE
from tests.support.processes import finish, record, script, start, torchrun, warm
from tests.support.torch_release import since_2_12

SCRIPT = Path(__file__).resolve().parents[2] / "support" / "llama.py"
TEXT = SCRIPT.read_text().splitlines()
#: What is recorded, by name: arguments of the script.
VARIANTS = {
    "plain": "",
    "again": "",
    "eps": "--fault eps",
    "order": "--fault order",
    "scale": "--fault scale",
    "autocast": "--autocast",
    "autocast-eps": "--autocast --fault eps --eps 0.5",
    "checkpoint": "--checkpoint",
    "fused": "--fused",
    "traced": "--compile aot_eager",
    "traced-eps": "--compile aot_eager --blocks --fault eps",
}
COMPILED = "--compile inductor --blocks"


def line_of(words: str) -> int:
    """The line of the script that ends with this comment."""
    return next(n for n, text in enumerate(TEXT, 1) if text.endswith(f"# the line of {words}"))


class Runs:
    """Records a variant when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[str, precdoctor.runlog.Run] = {}
        self.digests: dict[str, str] = {}

    def __call__(self, name: str, arguments: str | None = None) -> precdoctor.runlog.Run:
        if name not in self._done:
            given = (VARIANTS[name] if arguments is None else arguments).split()
            recorded = ("--strict", "--ops", "0,1", "--", *warm(SCRIPT, *given))
            done = record(self._folder, *recorded, run=self._folder / name)
            assert done.status == 0, done.err
            self.digests[name] = digest(done.out)
            self._done[name] = precdoctor.open_run(done.run)
        return self._done[name]

    def compare(self, a: str, b: str):
        return compare_ops(self(a), self(b))


def digest(out: bytes) -> str:
    return out.decode().split("DIGEST ")[1].strip()


def plain_digest(folder: Path, arguments: str) -> str:
    """What the script prints when nobody records it."""
    return digest(finish(start(folder, warm(SCRIPT, *arguments.split())), folder).out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("ops"))


@pytest.mark.parametrize(
    "name", ["autocast", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plain", "checkpoint", "traced"))]
)
def test_a_run_with_its_ops_listed_trains_as_it_would_have(runs, name, tmp_path):
    run = runs(name)
    assert runs.digests[name] == plain_digest(tmp_path, VARIANTS[name])
    assert verify(run.path).ok
    events = run.events()
    assert not set(events["event"]) & {"error", "warning", "drop"}
    data = [json.loads(d) for d in events[events["event"] == "ops"]["data"]]
    assert [(d["outcome"], d["complete"]) for d in data] == [("done", True)] * 2


def test_the_list_tells_what_ran_where_and_what_made_what(runs):
    ops = runs("plain").ops(filters=[("step", "==", 0)])
    [norm] = ops[(ops["module"] == "blocks.1.ffn_norm") & (ops["op"] == "aten.add.Tensor") & (ops["side"] == "out")
                 & (ops["phase"] == "forward")].to_dict("records")  # fmt: skip
    assert (
        norm["line"] == line_of("eps") and norm["settings"] == '{"other": 1e-05}' and norm["code"].startswith("return")
    )
    mine = ops[(ops["index"] == norm["index"]) & (ops["side"] == "in")]
    [producer] = ops[(ops["index"] == int(mine["producer"].iloc[0])) & (ops["side"] == "out")].to_dict("records")
    assert producer["op"] == "aten.mean.dim" and producer["fingerprint"] == mine["fingerprint"].iloc[0]
    assert {"forward", "loss", "backward", "optimizer"} == set(ops["phase"])
    weights = ops[ops["name"] == "blocks.0.attention.wq.weight"]
    assert weights["producer"].isna().all() and {"aten.mm.default"} <= set(weights["op"])
    gradients = ops[(ops["phase"] == "backward") & (ops["module"] == "head") & (ops["op"] == "aten.mm.default")]
    assert len(set(gradients["index"])) == 2 and set(gradients["line"].dropna()) == {
        n for n, text in enumerate(TEXT, 1) if "self.head(self.norm(x))" in text
    }


def test_between_listed_steps_nothing_is_listed(runs, tmp_path):
    done = record(tmp_path, "--ops", "2", "--", *warm(SCRIPT, "--steps", "4"))
    assert set(precdoctor.open_run(done.run).ops()["step"]) == {2}


def test_code_without_modules_is_listed_from_its_second_step_on(tmp_path):
    done = record(tmp_path, "--strict", "--ops", "0,1", "--", *warm(SCRIPT, "--functional"))
    ops = precdoctor.open_run(done.run).ops()
    assert set(ops["step"]) == {1} and {"aten.silu.default", "aten.mm.default"} <= set(ops["op"])
    assert digest(done.out) == plain_digest(tmp_path, "--functional")


def test_equal_runs_differ_in_nothing(runs, capsys):
    assert runs.compare("plain", "again").first is None
    assert main(["compare", str(runs("plain").path), str(runs("again").path), "--ops", "--fail-on", "warning"]) == 0
    assert "Nothing differs" in capsys.readouterr().out


@pytest.mark.slow
def test_checkpointing_computes_the_same_once_more(runs):
    assert runs.compare("plain", "checkpoint").first is None


@pytest.mark.parametrize(
    ("fault", "op", "lines"),
    [
        ("eps", "aten.add.Tensor", ("eps",)),
        pytest.param("order", "aten.add.Tensor", ("order",), marks=pytest.mark.slow),
        pytest.param("scale", "aten.mul.Tensor", ("scale, before",), marks=pytest.mark.slow),
    ],
)
def test_a_planted_fault_is_the_first_op_that_differs(runs, fault, op, lines, capsys):
    found = runs.compare("plain", fault)
    assert found.first is not None and found.first.step == 0
    origin = found.first.origin
    assert origin is found.first.first is found.first.beyond
    assert (origin.op.name, origin.op.line) == (op, line_of(*lines))
    assert origin.op.module.startswith("blocks.1") and origin.op.file.endswith("llama.py")
    assert all(d.explained for d in found.first.differences if d.op.phase in ("forward", "loss") and d is not origin)
    paths = [str(runs(name).path) for name in ("plain", fault)]
    assert main(["compare", *paths, "--ops", "--fail-on", "warning", "--output-format", "json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["compare_ops"]["step"] == 0 and told["findings"][0]["code"] == "PD810"
    assert told["findings"][0]["location"]["source"]["line"] == line_of(*lines)
    if fault == "eps":
        assert told["findings"][0]["message"].startswith("Argument `other` is 1e-05 in A and 0.01 in B. Its results")


def test_autocast_is_explained_by_its_format_and_told_where_it_begins(runs):
    found = runs.compare("plain", "autocast")
    assert found.first is not None and all(x.beyond is None for x in found.lists)
    first = found.first.first
    assert (first.op.name, first.op.module) == ("aten._to_copy.default", "blocks.0.attention.wq")
    assert found.diagnosis.findings[0].severity == "info"


@pytest.mark.parametrize("other", [pytest.param(n, marks=pytest.mark.slow) for n in ("plain", "autocast")])
def test_a_wrong_eps_shows_through_the_rounding_of_bfloat16(runs, other):
    origin = runs.compare(other, "autocast-eps").first.origin
    assert (origin.op.line, origin.op.module, origin.explained) == (line_of("eps"), "blocks.1.ffn_norm", False)


@pytest.mark.slow
def test_another_optimizer_kernel_is_compared_by_the_weights_it_makes(runs):
    found = runs.compare("plain", "fused")
    assert all(x.beyond is None for x in found.lists)
    assert found.first.first.b.name == "aten._fused_adamw_.default"


@pytest.mark.slow
def test_compiled_code_is_one_op_with_what_goes_in_and_out(runs):
    ops = runs("traced").ops(filters=[("step", "==", 0), ("op", "in", ["compiled.forward", "compiled.backward"])])
    assert set(ops["line"]) == {line_of("the call")}
    assert {"embed.weight", "head.weight"} <= set(ops["name"].dropna())
    assert (ops["op"] == "compiled.backward").sum() > 10
    assert runs.compare("plain", "traced").first is None  # the same kernels, traced


@since_2_12
@pytest.mark.slow
def test_a_fault_in_compiled_code_is_in_the_part_that_was_compiled(runs):
    origin = runs.compare("plain", "traced-eps").first.origin
    assert (origin.b.name, origin.b.module, origin.explained) == ("compiled.forward", "blocks.1", False)
    assert (origin.a.module, origin.a.line) == ("blocks.1", 1 + line_of("order"))  # what its forward returns


@pytest.mark.slow
def test_no_specimen_of_the_zoo_trains_differently_with_its_ops_listed(zoo, tmp_path):
    options = {"strict": True, "ops": [0, 1, 2, 3]}
    [listed] = train(tmp_path, PRECDOCTOR_OPTIONS=json.dumps(options))
    assert {name: line["digest"] for name, line in listed.items()} == {n: x["digest"] for n, x in zoo.plain.items()}
    outcomes = set()
    for name in listed:
        events = precdoctor.open_run(tmp_path / "runs" / name).events()
        assert not set(events["event"]) & {"error", "drop"}, name
        outcomes |= {(name, json.loads(d)["outcome"]) for d in events[events["event"] == "ops"]["data"]}
    assert not {name for name, outcome in outcomes if outcome == "dropped"}
    assert {name for name, outcome in outcomes if outcome == "refused"} == {"functional_loss"}


@pytest.mark.slow
def test_ranks_are_listed_and_train_as_they_would_have(tmp_path):
    script(tmp_path, "twice.py", TWICE)
    done = [
        record(tmp_path, "--strict", "--ops", "0,1", "--", *torchrun(2, "twice.py"), run=tmp_path / name)
        for name in "ab"
    ]
    assert all(sorted(d.out.decode().split("\n"))[1:] == ["RESULT 0 True", "RESULT 1 True"] for d in done)
    found = compare_ops(*(precdoctor.open_run(d.run) for d in done))
    assert [(x.step, x.rank) for x in found.lists] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert found.first is None and all(x.ops_a == x.paired > 100 for x in found.lists)


@pytest.mark.slow
def test_generated_code_is_explained_by_its_format(runs, tmp_path):
    run = runs("compiled", COMPILED)
    assert runs.digests["compiled"] == plain_digest(tmp_path, COMPILED)
    found = compare_ops(runs("plain"), run)
    assert found.first is not None and all(x.beyond is None for x in found.lists)
    assert found.first.first.b.name == "compiled.forward"
    faulty = compare_ops(runs("plain"), runs("compiled-eps", f"{COMPILED} --fault eps")).first.origin
    assert (faulty.b.name, faulty.b.module, faulty.explained) == ("compiled.forward", "blocks.1", False)
