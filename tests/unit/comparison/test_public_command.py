from __future__ import annotations

import pytest

from precdoctor.comparison.baseline import without_secrets


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("python train.py --api-key abc --lr 3e-4", "python train.py --api-key <hidden> --lr 3e-4"),
        ("python train.py --hub_token=abc run.name=x", "python train.py --hub_token=<hidden> run.name=x"),
        ("env WANDB_API_KEY=abc python train.py", "env WANDB_API_KEY=<hidden> python train.py"),
        ("python train.py logger.password=abc", "python train.py logger.password=<hidden>"),
        ("python train.py --token --verbose", "python train.py --token --verbose"),
    ],
)
def test_secrets_are_hidden(command, told):
    assert " ".join(without_secrets(command.split())) == told


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node 8 train.py --tokenizer gpt2 --max-token 512",
        "python train.py --num-key-value-heads=4 data/tokens.bin --monkey=see",
        "precdoctor a=b --author me",
    ],
)
def test_everything_else_stays(command):
    assert without_secrets(command.split()) == command.split()
