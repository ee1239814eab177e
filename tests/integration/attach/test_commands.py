"""Every way people start a training script is recorded, and the script cannot tell."""

from __future__ import annotations

import pytest

import precdoctor
from tests.support.processes import PYTHON, SCRIPTS, environment, finish, record, script, start

#: Asks for torch before it imports it, as transformers and accelerate do, and shows what it sees of the interpreter.
NOSY = """
import importlib.util
import sys

print(importlib.util.find_spec("torch").origin)
import sitecustomize
import training

torch = training.torch
print(sitecustomize.greeting, sys.argv, type(torch.__loader__), torch.__spec__.loader is torch.__loader__)
print(training.digest(training.train(3)))
print(sys.stdin.read(), file=sys.stderr)
"""
ON_TWO_RANKS = """
import os
import torch
import torch.distributed as dist
import training

dist.init_process_group("gloo")
net = torch.nn.parallel.DistributedDataParallel(training.model())
training.train(3, net)
dist.destroy_process_group()
"""
WITH_ACCELERATE = """
import torch
import training
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
net = training.model()
net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
for _ in range(3):
    accelerator.backward(net(torch.randn(4, 8)).mean())
    optimizer.step()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("attach")


@pytest.fixture(scope="module")
def plain(folder):
    """The same script without and with the recorder, among a user's own sitecustomize."""
    script(folder, "train.py", NOSY)
    script(folder, "mine/sitecustomize.py", "import os; greeting = 'mine'; os.write(2, b'once\\n')")
    env = environment(PYTHONPATH=str(folder / "mine"))
    bare = finish(start(folder, [PYTHON, "train.py", "--lr", "1"], env), folder, b"to stdin")
    recorded = record(folder, "--", "python", "train.py", "--lr", "1", env=env, stdin=b"to stdin", run=folder / "plain")
    return bare, recorded


def test_a_script_behind_python(plain):
    _, run = plain
    assert run.status == 0
    assert list(run.ranks) == ["rank-00000"]
    assert run.steps() == [0, 1, 2]
    assert run.end() == {"reason": "exit", "steps": 3, "errors": 0, "dropped": {}}


def test_its_output_is_the_same_to_the_byte_losses_and_weights_included(plain):
    bare, run = plain
    assert run.out == bare.out
    assert b"mine ['train.py', '--lr', '1']" in run.out


def test_stdin_is_the_scripts_and_the_users_own_sitecustomize_runs_once(plain):
    bare, run = plain
    assert bare.err == "once\nto stdin\n"
    assert run.err.startswith("once\n" + bare.err)  # the parent is a Python of the user's, too


def test_the_closing_lines_say_what_to_type_next(plain, folder):
    _, run = plain
    assert run.said == ["recorded 1 process in plain; next, type:"]
    assert run.err.endswith("  precdoctor diagnose plain\n")


def test_the_run_states_its_command_and_options(plain, folder):
    info = precdoctor.open_run(plain[1].run).info
    assert info["command"] == ["python", "train.py", "--lr", "1"]
    assert info["cwd"] == str(folder)
    assert (info["options"]["every"], info["options"]["budget"]) == (None, 0.01)  # led by the budget


@pytest.mark.slow
def test_a_bare_script_with_arguments(folder):
    script(folder, "bare.py", "import sys, training; training.train(2); print(sys.argv)")
    run = record(folder, "bare.py", "--lr", "1", "-o", "x", run=folder / "bare")
    assert (run.status, run.steps()) == (0, [0, 1])
    assert run.out.endswith(b"['bare.py', '--lr', '1', '-o', 'x']\n")


@pytest.mark.slow
def test_a_module(folder):
    script(folder, "pkg/__init__.py", "")
    script(folder, "pkg/train.py", "import sys, training; training.train(2); print(__package__, sys.argv[1:])")
    run = record(folder, "-m", "pkg.train", "--lr", "1", run=folder / "module")
    assert (run.status, run.steps()) == (0, [0, 1])
    assert run.out.endswith(b"pkg ['--lr', '1']\n")


@pytest.mark.slow  # test_distributed.py has two ranks under torchrun, too
def test_torchrun_with_two_ranks(folder):
    script(folder, "ddp.py", ON_TWO_RANKS)
    run = record(folder, "--", "torchrun", "--standalone", "--nproc-per-node", "2", "ddp.py", run=folder / "ddp")
    assert run.status == 0, run.err
    assert list(run.ranks) == ["rank-00000", "rank-00001"]
    assert run.steps("rank-00000") == run.steps("rank-00001") == [0, 1, 2]
    assert "recorded 2 processes" in run.err
    armed = run.pids("armed")
    assert len(armed) == 2
    assert run.pids("torch") > armed  # the launcher has torch, too, and stays out of it
    modules = precdoctor.open_run(run.run).tensors(columns=["module", "kind"])
    assert not modules["module"].str.contains("module").any()  # the wrapper leaves no prefix


@pytest.mark.slow
@pytest.mark.skipif(not (SCRIPTS / "accelerate").exists(), reason="accelerate is not installed")
def test_accelerate_launch(folder):
    script(folder, "fast.py", WITH_ACCELERATE)
    command = [
        "accelerate",
        "launch",
        "--cpu",
        "--num_processes",
        "1",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
    ]
    run = record(folder, "--", *command, "--dynamo_backend", "no", "fast.py", run=folder / "fast")
    assert run.status == 0, run.err
    assert (list(run.ranks), run.steps()) == (["rank-00000"], [0, 1, 2])
    assert len(run.pids("armed")) == 1


def test_pytest_running_a_training_test(folder):
    script(folder, "test_train.py", "import training\ndef test_training():\n    training.train(2)\n")
    run = record(folder, "--", "python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_train.py")
    assert run.status == 0, run.err
    assert b"1 passed" in run.out
    assert run.steps() == [0, 1]
