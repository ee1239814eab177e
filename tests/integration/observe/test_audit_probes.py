"""Faults of five lines, seen by the op audit: the rules name each line, and are silent about its healthy mirror."""

from __future__ import annotations

import contextlib
import hashlib
import json
import linecache
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from precdoctor.diagnosis import diagnose
from precdoctor.diagnosis.analyses import scans
from precdoctor.diagnosis.claims.finding import Finding, Severity
from precdoctor.recording.deepscan.scan_mode import ScanMode
from tests.support import audit_probes
from tests.support.audit_probes import PROBES, Probe
from tests.support.scanning import scanned

MEMORY = 64 << 20
STEPS = (0, 1)


def step(name: str, probe: Probe, arguments: tuple[Any, ...], mode: ScanMode) -> Any:
    """What a probe returns, once its gradients are there; ``mode`` is told where it is, open or not."""
    mode.stage = "loss" if probe.stage == "module" else probe.stage
    if probe.stage == "module":
        mode.modules.append((name, "layer"))
    found = probe.run(*arguments)
    mode.modules.clear()
    if isinstance(found, torch.Tensor) and found.requires_grad:
        mode.stage = "loss"
        found.float().sum().backward(retain_graph=True)
    return found


def scan(name: str, probe: Probe, arguments: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Events of one scanned step of a probe; each is a root of its own."""
    mode = ScanMode(MEMORY, values=True)
    with mode:
        step(name, probe, arguments, mode)
    assert mode.failure is None, (name, mode.failure)
    return [{**e, "root": e["root"] or name} for e in mode.facts() + mode.coverage.events()]


def findings(directory: Path, kind: str) -> dict[str, list[Finding]]:
    """By probe: of one diagnosis of a run in which all of them were scanned."""
    run = scanned(steps=STEPS)
    for name, probe in PROBES.items():
        torch.manual_seed(0)
        arguments = getattr(probe, kind)()
        events = scan(name, probe, arguments)
        for number in STEPS:
            run.events += [{**e, "event": "scan", "step": number, "data": json.dumps(e["data"])} for e in events]
    found: dict[str, list[Finding]] = {name: [] for name in PROBES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scans, "_MAX_PLACES", len(PROBES))
        diagnosis = diagnose(run.write(directory / kind))
    for finding in diagnosis.findings:
        if finding.severity is not Severity.INFO:
            found[finding.location.root or ""].append(finding)
    return found


def digest(name: str, probe: Probe, scanned_steps: set[int]) -> str:
    """Of all that three steps return and leave behind, some of them scanned."""
    torch.manual_seed(0)
    arguments, mix = probe.bad(), hashlib.sha256()
    for number in range(3):
        mode = ScanMode(MEMORY, values=True)
        with mode if number in scanned_steps else contextlib.nullcontext():
            found = step(name, probe, arguments, mode)
        mode.facts()
        tensors = [x for x in tree_leaves((found, arguments)) if isinstance(x, torch.Tensor)]
        for x in (*tensors, *(x.grad for x in tensors if x.is_leaf and x.grad is not None)):
            mix.update(x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return mix.hexdigest()


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if number % 3 else ()) for number, n in enumerate(PROBES)]
)
def test_whichever_steps_are_scanned_not_a_bit_changes(name):
    some = {n for n in range(3) if random.Random(name).getrandbits(3) >> n & 1} or {1}
    assert digest(name, PROBES[name], some) == digest(name, PROBES[name], set())


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    return findings(tmp_path_factory.mktemp("probes"), "bad")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return findings(tmp_path_factory.mktemp("probes"), "good")


def line_of(finding: Finding) -> str:
    source = finding.location.source
    assert source is not None and source.file.endswith("audit_probes.py")
    return linecache.getline(audit_probes.__file__, source.line)


@pytest.mark.parametrize("name", PROBES)
def test_a_fault_is_named_with_its_line(name, bad):
    probe = PROBES[name]
    named = [f for f in bad[name] if f.code in probe.codes and probe.text in line_of(f)]
    assert named, [(f.code, line_of(f)) for f in bad[name]]
    assert all(f.location.op for f in named)


@pytest.mark.parametrize("name", PROBES)
def test_its_healthy_mirror_is_silent(name, good):
    assert good[name] == []
