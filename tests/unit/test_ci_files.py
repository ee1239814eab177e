"""The files to copy in docs/ci: well-formed, of the shape their systems take, and their shell steps run."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from precdoctor.cli.values import OUTPUT_FORMATS

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / "docs" / "ci"
TRAINING = """\
import torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


class Strict(yaml.SafeLoader):
    """Refuses a key given twice, as the CI systems do, and leaves `on` a word."""


def _mapping(loader, node, deep=False):
    keys = [loader.construct_object(key, deep=deep) for key, _ in node.value]
    assert len(keys) == len(set(keys)), f"a key twice: {keys}"
    return {k: loader.construct_object(v, deep=True) for k, (_, v) in zip(keys, node.value, strict=True)}


Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
Strict.yaml_implicit_resolvers = {
    c: [(tag, pattern) for tag, pattern in found if tag != "tag:yaml.org,2002:bool"]
    for c, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load(name: str):
    return yaml.load((CI / name).read_text(), Loader=Strict)


STEP_KEYS = {"name", "id", "if", "uses", "with", "run", "shell", "env", "working-directory", "continue-on-error"}


def test_the_composite_action_is_one():
    action = load("action.yml")
    assert action.keys() <= {"name", "author", "description", "inputs", "outputs", "runs", "branding"}
    assert action["runs"]["using"] == "composite"
    ids = {step.get("id") for step in action["runs"]["steps"]}
    for step in action["runs"]["steps"]:
        assert step.keys() <= STEP_KEYS
        assert "uses" in step or {"run", "shell"} <= step.keys()  # composite steps must name their shell
    for name, given in action["inputs"].items():
        assert given.keys() <= {"description", "required", "default", "deprecationMessage"}, name
    for value in (o["value"] for o in action["outputs"].values()):
        assert re.fullmatch(r"\$\{\{ steps\.(\w+)\.outputs\.\w+ \}\}", value)[1] in ids


def test_nothing_is_pasted_into_a_shell():
    """An input in a script would be code; in the environment it is text."""
    for step in load("action.yml")["runs"]["steps"]:
        assert "${{" not in step["run"]
        for value in step["env"].values():
            name = re.fullmatch(r"\$\{\{ inputs\.([\w-]+) \}\}", value)[1]
            assert name in load("action.yml")["inputs"]


def test_the_workflow_uses_the_action_as_it_is():
    workflow, inputs = load("workflow.yml"), load("action.yml")["inputs"]
    assert workflow.keys() <= {"name", "run-name", "on", "permissions", "env", "defaults", "concurrency", "jobs"}
    assert set(workflow["on"]) <= {"pull_request", "push", "workflow_dispatch", "schedule"}
    [job] = workflow["jobs"].values()
    steps = job["steps"]
    assert all(step.keys() <= STEP_KEYS and ("uses" in step) != ("run" in step) for step in steps)
    [ours] = [s for s in steps if s.get("uses", "").startswith("./")]
    assert ours["with"].keys() <= inputs.keys()
    assert {n for n, i in inputs.items() if i["required"] == "true"} <= ours["with"].keys()
    kept = next(s for s in steps if "upload-artifact" in s.get("uses", ""))
    assert kept["with"]["path"] == inputs["output"]["default"]


def test_the_gitlab_job():
    [job] = load("gitlab-ci.yml").values()
    assert job.keys() <= {"image", "stage", "variables", "before_script", "script", "artifacts", "rules"}
    written = dict(re.findall(r"--also (\w+)=(\S+)", " ".join(job["script"])))
    assert written.keys() <= set(OUTPUT_FORMATS)
    assert job["artifacts"]["reports"] == {"junit": written["junit"], "codequality": written["gitlab"]}


@pytest.fixture
def action(tmp_path):
    """Runs the action's shell steps as a runner would; returns status, outputs and summary."""
    shim = tmp_path / "bin" / "precdoctor"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m precdoctor "$@"\n')
    shim.chmod(shim.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "train.py").write_text(TRAINING)

    def run(first: int = 0, **given: str) -> tuple[int, str, str]:
        action = load("action.yml")
        values = {name: given.get(name.replace("-", "_"), i.get("default", "")) for name, i in action["inputs"].items()}
        files = {name: tmp_path / name.lower() for name in ("GITHUB_OUTPUT", "GITHUB_STEP_SUMMARY")}
        for file in files.values():
            file.write_text("already here\n" if "SUMMARY" in str(file).upper() else "")
        status = 0
        for step in action["runs"]["steps"][first:]:
            own = {k: values[re.search(r"inputs\.([\w-]+)", v)[1]] for k, v in step["env"].items()}
            environ = {**os.environ, **own, **{k: str(v) for k, v in files.items()}, "PYTHONPATH": str(ROOT)}
            environ |= {"PATH": f"{shim.parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
            command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            status = subprocess.run(command, cwd=tmp_path, env=environ, check=False).returncode
            if status:
                break
        return status, files["GITHUB_OUTPUT"].read_text(), files["GITHUB_STEP_SUMMARY"].read_text()

    return run


@pytest.mark.slow
def test_the_steps_run(action, tmp_path):
    command = f"'{sys.executable}' train.py"
    status, outputs, summary = action(command=command, repeats="2")
    assert (status, outputs) == (0, "status=0\n")
    assert summary.startswith("already here\n## precdoctor passed")
    assert json.loads((tmp_path / "precdoctor-ci" / "gate.json").read_text())["exit_code"] == 0

    status, outputs, summary = action(first=1, command=command, gate_flags="--fail-if loss:*:0")
    assert (status, outputs) == (1, "status=1\n")
    assert "PD815" in summary
