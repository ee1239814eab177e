"""A process is a rank when it trains: helpers that only call models neither take a directory nor a number."""

from __future__ import annotations

import json

import pytest

import precdoctor
from precdoctor.cli import main
from precdoctor.runlog.files import ATTACH_FILE
from tests.support.processes import PYTHON, finish, record, script, start, torchrun, warm

PRECDOCTOR = (PYTHON, "-m", "precdoctor")

HELPERS = """
import multiprocessing
import sys
import torch
import training


def serve(ready, over):
    training.model().eval()(torch.ones(4, 8))  # with gradients, as forgetful people do
    ready.set()
    over.wait()  # until it is ended without a word


def validate():
    with torch.no_grad():
        training.model()(torch.ones(4, 8))


def main(method):
    context = multiprocessing.get_context(method)
    before = context.Process(target=validate)
    before.start()
    before.join()
    ready, over = context.Event(), context.Event()
    beside = context.Process(target=serve, args=(ready, over))
    beside.start()
    ready.wait()
    training.train(3)
    beside.terminate()
    beside.join()
    after = context.Process(target=validate)
    after.start()
    after.join()


if __name__ == "__main__":
    main(sys.argv[1])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("ranks")


def only_rank_is_whole(run, steps):
    assert run.status == 0, run.err
    assert list(run.ranks) == ["rank-00000"]
    assert run.end() == {"reason": "exit", "steps": steps, "errors": 0, "dropped": {}}
    assert run.steps() == list(range(steps))
    assert len(run.pids("armed")) == 1


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_helpers_before_beside_and_after_the_trainer_leave_a_line_each(folder, method):
    script(folder, "helpers.py", HELPERS)
    run = record(folder, "--", *warm("helpers.py", method), run=folder / method)
    only_rank_is_whole(run, 3)
    assert len(run.pids("model")) == 4 and not run.pids("error")
    assert run.said[0].startswith("recorded 1 process in ")
    assert main(["gate", str(run.run)]) == 0


ACTORS = """
import torch
import torch.multiprocessing as mp
import training


def act(net, states, rollouts):
    with torch.no_grad():
        while (state := states.get()) is not None:
            rollouts.put(float(net(state).mean()))


if __name__ == "__main__":
    context = mp.get_context("spawn")
    net = training.model()
    net.share_memory()
    states, rollouts = context.Queue(), context.Queue()
    actors = [context.Process(target=act, args=(net, states, rollouts)) for _ in range(2)]
    for actor in actors:
        actor.start()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(3):
        for _ in range(4):
            states.put(torch.ones(4, 8))
        reward = sum(rollouts.get() for _ in range(4))
        optimizer.zero_grad()
        (net(torch.ones(4, 8)).mean() * reward).backward()
        optimizer.step()
    for _ in actors:
        states.put(None)
    for actor in actors:
        actor.join()
"""


@pytest.mark.slow
def test_actors_that_share_weights_with_their_learner_are_no_ranks(folder):
    script(folder, "actors.py", ACTORS)
    only_rank_is_whole(record(folder, "--", *warm("actors.py"), run=folder / "actors"), 3)


HOGWILD = """
import multiprocessing
import torch
import training


def train(net):
    training.train(2, net)


if __name__ == "__main__":
    net = training.model()
    net(torch.ones(4, 8))  # tried out where nothing is trained
    net.share_memory()
    workers = [multiprocessing.get_context("fork").Process(target=train, args=(net,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
"""


def test_each_of_several_trainers_is_a_rank_and_their_parent_none(folder):
    script(folder, "hogwild.py", HOGWILD)
    run = record(folder, "hogwild.py", run=folder / "hogwild")
    assert run.status == 0, run.err
    assert list(run.ranks) == ["rank-00000", "rank-00000.1"]
    assert [run.end(rank)["steps"] for rank in run.ranks] == [2, 2]
    assert len(run.pids("armed")) == 2 and len(run.pids("model")) == 3


LATE_GROUP = """
import os
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import training


def work(rank, place):
    net = training.model()
    net(torch.ones(4, 8))  # before there is a group: lazy layers are made this way
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
    training.train(2, net)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, (os.path.abspath(sys.argv[1]),), nprocs=2)
"""


@pytest.mark.slow
def test_a_rank_has_the_number_it_has_when_it_begins_to_train(folder):
    script(folder, "late.py", LATE_GROUP)
    run = record(folder, "--", *warm("late.py", "store"), run=folder / "late")
    assert run.status == 0, run.err
    assert list(run.ranks) == ["rank-00000", "rank-00001"]
    assert run.steps("rank-00001") == [0, 1]


TORCHRUN = """
import multiprocessing
import torch
import torch.distributed as dist
import training


def validate():
    training.model()(torch.ones(4, 8))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    helper = multiprocessing.get_context("spawn").Process(target=validate)  # it inherits RANK
    helper.start()
    helper.join()
    net = torch.nn.parallel.DistributedDataParallel(training.model())
    training.train(2, net)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_helpers_of_torchrun_ranks_do_not_take_their_numbers(folder):
    script(folder, "ddp.py", TORCHRUN)
    run = record(folder, "--", *torchrun(2, "ddp.py"), run=folder / "ddp")
    assert run.status == 0, run.err
    assert list(run.ranks) == ["rank-00000", "rank-00001"]
    assert [run.steps(rank) for rank in run.ranks] == [[0, 1], [0, 1]]
    assert len(run.pids("model")) == 4


# --- what happens before the first step is not lost ------------------------------------------------------------------

FIRST = """
import os
import signal
import sys
import torch
import training

net = training.model()
x = torch.ones(4, 8)
what = sys.argv[1]
if what == "manual":
    for step in range(3):
        net(x + step).mean().backward()
        with torch.no_grad():
            for p in net.parameters():
                p -= 0.1 * p.grad
        net.zero_grad()
elif what == "check":  # the script's own, in the first forward pass
    y = net(x * float("inf"))
    if not y.isfinite().all():
        sys.exit(3)
elif what == "raises":
    raise ValueError(net(x).sum())
elif what == "backward":
    net(x).mean().backward()
    raise SystemExit(4)
elif what == "loss":  # of nothing a module made
    loss = (net(x) * float("nan")).mean()
    loss.backward()
elif what == "killed":
    net(x).mean().backward()
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "serves":
    with torch.no_grad():
        for _ in range(200):
            net(x)
    training.train(2, net)
"""


@pytest.fixture(scope="module")
def first(folder):
    script(folder, "first.py", FIRST)
    return lambda what: record(folder, "--", *warm("first.py", what), run=folder / what)


def test_steps_made_by_hand_make_a_rank(first):
    run = first("manual")
    assert run.steps() == [0, 1, 2], run.err


def test_the_first_step_has_its_forward_pass(first):
    tensors = precdoctor.open_run(first("manual").run).tensors()
    kinds = set(tensors[tensors["step"] == 0]["kind"])
    assert {"batch", "output", "loss", "grad_output", "weight_grad", "weight"} <= kinds


@pytest.mark.parametrize(("what", "status"), [("check", 3), ("raises", 1), ("backward", 4)])
def test_what_ends_in_its_first_step_is_recorded_as_far_as_it_came(first, what, status):
    run = first(what)
    assert run.status == status
    assert run.end()["reason"] == "exit"
    opened = precdoctor.open_run(run.run)
    assert opened.steps()["complete"].tolist() == [False]
    assert "output" in set(opened.tensors()["kind"])


def test_a_nan_in_the_first_forward_pass_is_found(first):
    findings = precdoctor.diagnose(first("check").run).findings
    assert findings[0].code in ("PD101", "PD104") and findings[0].location.step == 0


def test_a_nan_loss_of_the_first_backward_pass_is_an_incident(first):
    run = precdoctor.open_run(first("loss").run)
    assert (run.events()["event"] == "incident").any()


def test_a_process_killed_before_its_first_step_leaves_the_reason(first):
    run = first("killed")
    assert not run.ranks
    assert run.said == [
        (
            "nothing was recorded: a backward pass ran, but the process was killed before its first optimizer step "
            "(the command itself ended with status 137)"
        )
    ]


def test_a_long_rollout_before_the_first_step_does_not_hide_it(first):
    run = first("serves")
    assert run.steps() == [0, 1], run.err
    tensors = precdoctor.open_run(run.run).tensors()
    phases = tensors[(tensors["step"] == 0) & (tensors["kind"] == "output")].groupby("phase").size()
    assert phases["train"] == 4  # one per module


# --- inference -------------------------------------------------------------------------------------------------------

SERVER = """
import sys
import torch
import training


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.head(torch.exp(self.body(x)))


torch.manual_seed(0)
net = Net().half().eval()
softmax = torch.nn.Softmax(-1)
with torch.inference_mode():
    for request in range(12):
        softmax(net((torch.randn(4, 8) * (100 if request == int(sys.argv[1]) else 1)).half()))
if "trains" in sys.argv:
    training.train(2)
"""


@pytest.fixture(scope="module")
def server(folder):
    script(folder, "server.py", SERVER)
    return folder


def test_a_run_without_training_says_what_would_record_it(server):
    run = record(server, "server.py", "-1", run=server / "unasked")
    assert run.status == 0 and not run.ranks
    assert run.said == [
        (
            "nothing was recorded: a model was called, but no backward pass and no optimizer step was seen; "
            "`precdoctor record --inference` records runs that only call models"
        )
    ]
    notes = [json.loads(line)["event"] for line in (run.run / ATTACH_FILE).read_text().splitlines()]
    assert notes == ["boot", "torch", "model"]
    shown = finish(start(server, [*PRECDOCTOR, "diagnose", "unasked"]), run.run)
    assert shown.status == 3
    assert shown.err.count("precdoctor record --inference") == 1


PURE = """
import torch

net, x = torch.nn.Linear(8, 1), torch.randn(4, 8)
weights = {name: w.detach() for name, w in net.named_parameters()}
for _ in range(3):
    grads = torch.func.grad(lambda w: torch.func.functional_call(net, w, (x,)).square().mean())(weights)
    weights = {name: w - 0.1 * grads[name] for name, w in weights.items()}
"""


def test_a_training_inside_torch_func_says_that_it_cannot_be_followed(server):
    script(server, "pure.py", PURE)
    run = record(server, "pure.py", run=server / "pure")
    assert run.status == 0 and not run.ranks
    (said,) = run.said
    assert said.startswith("nothing was recorded: a model was called inside torch.func")
    assert "--inference" not in said


def test_each_call_of_a_model_is_a_step_of_an_inference_run(server):
    run = record(server, "--inference", "--", *warm("server.py", "-1"), run=server / "healthy")
    assert run.steps() == list(range(12)), run.err
    assert run.end() == {"reason": "exit", "steps": 12, "errors": 0, "dropped": {}}
    tensors = precdoctor.open_run(run.run).tensors()
    assert set(tensors["kind"]) == {"batch", "input", "output", "weight", "logits"}
    assert set(tensors[tensors["kind"] == "weight"]["step"]) == {0}  # nobody writes to them
    outputs = tensors[(tensors["root"] == "Softmax#0") & (tensors["kind"] == "output")]
    assert (outputs.groupby("step").size() == 1).all()
    found = precdoctor.diagnose(run.run)
    assert not found.findings
    assert not [rule for rule in found.rules if rule.status.value == "indeterminate"]


def test_a_bad_answer_of_an_inference_run_is_led_back(server):
    run = record(server, "--inference", "--", *warm("server.py", "5"), run=server / "sick")
    (finding,) = precdoctor.diagnose(run.run).findings
    assert (finding.code, finding.cause, finding.location.step) == ("PD101", "exp-overflow", 5)
    assert finding.resume_step is None and "checkpoint at or before" not in finding.message
    again = finish(start(server, [*PRECDOCTOR, "autopsy", "sick"]), run.run)
    assert again.status == 0, again.err
    (finding,) = precdoctor.diagnose(run.run).findings
    assert (finding.code, finding.location.source.file, finding.location.source.line) == ("PD101", "server.py", 13)


def test_from_its_first_backward_pass_on_an_inference_run_has_optimizer_steps(server):
    run = record(server, "--inference", "--", *warm("server.py", "-1", "trains"), run=server / "both")
    steps = precdoctor.open_run(run.run).steps()
    assert steps["optimizer"].tolist() == [""] * 12 + ["AdamW#0"] * 2
    assert steps["complete"].all() and run.end()["steps"] == 14
