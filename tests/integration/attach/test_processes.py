"""Training scripts start processes of their own: those that train get a directory each, the others none."""

from __future__ import annotations

import json

import pytest

import precdoctor
from precdoctor.runlog.verify import verify
from tests.support.processes import AS_ANYWHERE, PYTHON, environment, finish, record, record_command, script, start

LOADERS = """
import torch
import training


class Noisy(torch.utils.data.Dataset):
    def __init__(self):
        self.transform = torch.nn.Linear(8, 8)  # a module that is called in the workers

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with torch.no_grad():
            return self.transform(torch.full((8,), float(index)))


def main():
    net = training.model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for method in ("fork", "fork", "spawn", "forkserver"):  # the first before this process is armed, the others after
        loader = torch.utils.data.DataLoader(Noisy(), batch_size=4, num_workers=1, multiprocessing_context=method)
        batches = [batch.clone() for batch in loader]
        for batch in batches:
            optimizer.zero_grad()
            net(batch).mean().backward()
            optimizer.step()
        print(method, len(batches))


if __name__ == "__main__":
    main()
"""
SPAWNED = """
import torch.multiprocessing
import training


def work(index):
    training.train(2 + index)


if __name__ == "__main__":
    torch.multiprocessing.spawn(work, nprocs=2)
"""
FORKED = """
import multiprocessing
import os
import time
import training

net = training.model()
optimizer = training.torch.optim.SGD(net.parameters(), lr=0.1)


def train(steps):
    for _ in range(steps):
        optimizer.zero_grad()
        net(training.torch.ones(4, 8)).mean().backward()
        optimizer.step()


train(3)

child = os.fork()  # ends as any program does: atexit runs
if child == 0:
    train(2)
    raise SystemExit(0)
assert os.waitpid(child, 0)[1] == 0

child = os.fork()  # ends without a word, long enough after its last step
if child == 0:
    train(2)
    time.sleep(2)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0

child = multiprocessing.get_context("fork").Process(target=train, args=(2,))  # skips atexit
child.start()
child.join()
assert child.exitcode == 0
train(2)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def loaders(folder):
    script(folder, "loaders.py", LOADERS)
    return record(folder, "loaders.py", run=folder / "loaders")


def test_data_loader_workers_are_not_recorded(loaders):
    assert loaders.status == 0, loaders.err
    assert list(loaders.ranks) == ["rank-00000"]
    assert loaders.steps() == list(range(8))
    assert loaders.end() == {"reason": "exit", "steps": 8, "errors": 0, "dropped": {}}
    assert len(loaders.pids("armed")) == 1
    assert len(loaders.pids("torch")) >= 3  # the script, and the workers that were not forked from it


def test_their_modules_leave_no_rows(loaders):
    tensors = precdoctor.open_run(loaders.run).tensors(columns=["root"])
    assert set(tensors["root"]) <= {"Sequential#0", "", None}


@pytest.mark.slow
def test_every_trainer_of_mp_spawn_has_a_directory(folder):
    script(folder, "spawned.py", SPAWNED)
    run = record(folder, "spawned.py", run=folder / "spawned")
    assert run.status == 0, run.err
    assert list(run.ranks) == ["rank-00000", "rank-00000.1"]
    # without a process group both are rank 0; multiprocessing skips atexit, and their logs are closed all the same
    assert sorted(run.end(rank)["steps"] for rank in run.ranks) == [2, 3]
    assert len(run.pids("armed")) == 2


@pytest.fixture(scope="module")
def forked(folder):
    script(folder, "forked.py", FORKED)
    # with a thread pool in the parent: the child has none, and must not be made to wait for it
    return record(folder, "forked.py", run=folder / "forked", env=environment(OMP_NUM_THREADS="2"))


def test_a_child_of_an_armed_process_that_trains_has_its_own_directory(forked):
    assert forked.status == 0, forked.err
    assert list(forked.ranks) == ["rank-00000", "rank-00000.1", "rank-00000.2", "rank-00000.3"]
    assert len(forked.pids("armed")) == 4
    assert forked.said[-1].startswith("recorded 4 processes")


def test_the_parents_log_is_intact(forked):
    assert forked.end() == {"reason": "exit", "steps": 5, "errors": 0, "dropped": {}}
    assert verify(forked.run).ok


def test_children_close_their_logs_and_one_that_cannot_is_closed_by_the_launcher(forked):
    for rank, end in {"rank-00000.1": True, "rank-00000.2": False, "rank-00000.3": True}.items():
        assert (forked.end(rank) is not None) == end
        assert not list(forked.ranks[rank].glob("*.open"))
    steps = {report.name: report.step_range for report in verify(forked.run).ranks}
    assert steps == {
        "rank-00000": (0, 4),
        "rank-00000.1": (0, 1),
        "rank-00000.2": (0, 1),
        "rank-00000.3": (0, 1),
    }


def test_a_childs_facts_are_its_own(forked):
    """What the parent met before the fork is not taken for known."""
    for rank in precdoctor.open_run(forked.run).ranks:
        assert [root["class"] for root in rank.facts["roots"]] == ["Sequential"] * len(rank.facts["roots"])
        assert rank.facts["optimizers"], rank


ELSEWHERE = """
import os
import shutil
import sys
import torch
import training

os.chdir("outputs")


class Net(torch.nn.Linear):
    def forward(self, x, ill):
        y = super().forward(x)
        return torch.log(y - y) - torch.log(y - y) if ill else y


torch.manual_seed(0)
net = Net(8, 8)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(6):
    if step == 2:
        shutil.rmtree(os.getcwd())
    optimizer.zero_grad()
    net(torch.randn(4, 8), step == 4).mean().backward()
    optimizer.step()
shutil.rmtree(sys.argv[1])
raise SystemExit(5)
"""


def test_a_script_may_leave_its_directory_and_remove_it_and_that_of_the_launch(tmp_path):
    work = tmp_path / "work"
    (work / "outputs").mkdir(parents=True)
    script(work, "elsewhere.py", ELSEWHERE)
    command = record_command(tmp_path / "elsewhere", "elsewhere.py", str(work))
    env = environment(**AS_ANYWHERE)  # torch is to be all there before the directory goes
    run = finish(start(work, command, env), tmp_path / "elsewhere")
    assert run.status == 5, run.err
    assert not [line for line in run.said if "error" in line]
    assert run.end()["errors"] == 0 and run.steps() == list(range(6))
    found = precdoctor.diagnose(run.run)
    assert found.run["exit_status"] == 5
    assert found.findings[0].location.source.file == "elsewhere.py"


THREADS = """
import copy
import threading
import torch
import training

torch.set_num_threads(1)
NET = training.model()[::3]  # made once, and without dropout: threads share the generator that both would draw from


def train(seed, ill, done, begin=lambda: None):
    begin()
    net = copy.deepcopy(NET)
    draws = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(60):
        loss = net[1](net[0](torch.randn(4, 8, generator=draws))).square().mean()
        if step == 20 and ill:
            loss = loss + (loss - loss).sqrt()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    done[seed] = training.digest(net)


alone, together = {}, {}
begin = threading.Barrier(3).wait
threads = [threading.Thread(target=train, args=(seed, seed == 1, together, begin)) for seed in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for seed in range(3):
    train(seed, seed == 1, alone)
print(alone == together)
"""


STEPPING = """
import threading
import torch

begun, go_on = threading.Event(), threading.Event()


class Waits(torch.optim.SGD):
    def step(self, closure=None):
        begun.set()
        go_on.wait(30)
        return super().step(closure)


def step_by_hand():
    net = torch.nn.Linear(8, 1)
    optimizer = Waits(net.parameters(), lr=0.1)
    for p in net.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()


other = threading.Thread(target=step_by_hand)
other.start()
begun.wait(30)
net = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(10):
    if step == 5:
        go_on.set()
        other.join()
    optimizer.zero_grad()
    net(torch.ones(4, 8)).square().mean().backward()
    optimizer.step()
"""


def test_a_thread_in_the_midst_of_an_optimizer_step_is_not_displaced(folder):
    script(folder, "stepping.py", STEPPING)
    run = record(folder, "stepping.py", run=folder / "stepping")
    assert run.status == 0, run.err
    steps = precdoctor.open_run(run.run).steps()
    assert list(zip(steps["optimizer"], steps["micro_steps"], strict=True)) == [("Waits#0", 0)] + [("SGD#0", 1)] * 5


@pytest.mark.slow  # fault/test_threads.py has threads that train at once, too
def test_threads_that_train_at_once_do_not_disturb_each_other_through_us(folder):
    script(folder, "threads.py", THREADS)
    run = record(folder, "threads.py", run=folder / "threads")
    assert (run.status, run.out) == (0, b"True\n"), run.err
    events = precdoctor.open_run(run.run).events()
    assert sum(line.startswith("several threads use models at once; the first") for line in run.said) == 1
    assert events[events["event"] == "warning"]["data"].str.contains("several threads").sum() == 1
    # One of the three from when it was chosen on, what is left of another when it has ended, and all again.
    assert 3 * 60 < len(run.steps()) <= 6 * 60


REPLICAS = """
import threading
import torch
from torch import nn
import training


class Parallel(nn.DataParallel):  # as on two GPUs: replicas of the module, each called in a thread of its own
    def __init__(self, module):
        nn.Module.__init__(self)
        self.module = module

    def replicas(self):
        for _ in range(2):
            copies = {module: module._replicate_for_data_parallel() for module in self.module.modules()}
            for module, copy in copies.items():
                for name, child in module._modules.items():
                    setattr(copy, name, copies[child])
                for name, parameter in module._parameters.items():
                    setattr(copy, name, parameter * 1)
            yield copies[self.module]

    def forward(self, x):
        outputs = {}

        def work(number, replica, part):
            outputs[number] = replica(part)

        parts = zip(self.replicas(), x.chunk(2))
        threads = [threading.Thread(target=work, args=(n, *both)) for n, both in enumerate(parts)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return torch.cat([outputs[0], outputs[1]])


torch.set_num_threads(1)
torch.manual_seed(0)
net = Parallel(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(6):
    x = torch.randn(4, 8)
    if step == 5:
        x[0, 0] = float("inf")
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()
print(training.digest(net))
"""


@pytest.mark.slow
def test_replicas_in_threads_are_no_training_of_their_own(folder):
    script(folder, "replicas.py", REPLICAS)
    plain = finish(start(folder, [PYTHON, "replicas.py"]), folder)
    done = record(folder, "replicas.py", run=folder / "replicas")
    assert (done.status, done.out) == (0, plain.out), done.err
    assert sum(line.startswith("nn.DataParallel runs the model in threads") for line in done.said) == 1
    assert not any("several threads" in line for line in done.said)
    run = precdoctor.open_run(done.run)
    assert len(run.steps()) == 6
    kinds = run.tensors().groupby("kind", observed=True).size()
    assert kinds["update"] == kinds["weight_grad"] == 6 * 4
    events = run.events()
    (incident,) = [json.loads(data) for data in events[events["event"] == "incident"]["data"]]
    assert (incident["outcome"], incident["why"]) == ("refused", "nn.DataParallel runs the model in threads")
