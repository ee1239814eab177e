"""What a small mistake costs a training: the oracle of ``mutations.py``, which knows nothing of precdoctor.

Original and mutant run in plain torch. The mutant does harm, by the first of these measures that applies, if

- it stops with an exception,
- a loss of the last fifth or a weight at the end is not finite, and all are in the original,
- half of the elements that the original's optimizers move, or more, never move,
- so do half of the elements of copied modules (an average, a teacher),
- the mean of the last fifth of its losses is higher than the original's by more than a tenth of what the original
  learns, and by more than three standard errors of the difference.

Every loss that enters ``backward`` or ``GradScaler.scale`` counts. Everything else is `harmless`.
"""

from __future__ import annotations

import copy
import json
import math
import runpy
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import swa_utils
from torch.optim.optimizer import register_optimizer_step_pre_hook

from benchmarks.faults.truth import environment

Facts = dict[str, Any]
PATIENCE = 300
#: Excess of the final loss that counts as harm, as a share of what the original learns.
TOLERANCE = 0.1


class Probe:
    """What a script does to its losses, its weights and its copied modules."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        #: Weights and the parameters of copied modules, with their values before the next step of any optimizer.
        self.weights: dict[int, tuple[Any, Any]] = {}
        self.copied: dict[int, tuple[Any, Any]] = {}
        self.copies: list[Any] = []

    def install(self) -> None:
        """Patch torch in this process."""
        backward, scale, deepcopy = torch.Tensor.backward, torch.amp.GradScaler.scale, copy.deepcopy
        scaled: set[int] = set()

        def watched_backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if tensor.numel() == 1 and id(tensor) not in scaled:
                self.losses.append(float(tensor.detach()))
            return backward(tensor, *args, **kwargs)

        def watched_scale(scaler: Any, loss: Any) -> Any:
            result = scale(scaler, loss)
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self.losses.append(float(loss.detach()))
                scaled.clear()
                scaled.add(id(result))
            return result

        def watched_copy(x: Any, *args: Any, **kwargs: Any) -> Any:
            result = deepcopy(x, *args, **kwargs)
            if isinstance(result, torch.nn.Module):
                self.copies.append(result)
            return result

        def before_step(optimizer: Any, *_: Any) -> None:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if id(p) not in self.weights:
                    self.weights[id(p)] = p, p.detach().clone()
            while self.copies:
                self.copied |= {id(p): (p, p.detach().clone()) for p in self.copies.pop().parameters()}

        torch.Tensor.backward = watched_backward  # type: ignore[method-assign, assignment]
        torch.amp.GradScaler.scale = watched_scale  # type: ignore[method-assign, assignment]
        copy.deepcopy = swa_utils.deepcopy = watched_copy  # type: ignore[attr-defined]
        register_optimizer_step_pre_hook(before_step)

    def answer(self) -> Facts:
        """Everything measured."""
        return {
            "losses": self.losses,
            "finite": all(bool(p.isfinite().all()) for p, _ in self.weights.values()),
            "moved": _moved(self.weights),
            "copies": _moved(self.copied),
        }


def _moved(pairs: dict[int, tuple[Any, Any]]) -> int:
    return sum(int((p != start).sum()) for p, start in pairs.values())


def probe(path: Path) -> None:
    """Run one script under ``Probe``; the last line printed is what it measured, as JSON."""
    watch = Probe()
    watch.install()
    sys.argv, sys.path[0] = [str(path)], str(path.parent)
    broke = None
    try:
        names = runpy.run_path(str(path), run_name="__main__")  # noqa: F841 -- keeps the script's objects alive
    except Exception as error:  # noqa: BLE001 -- whatever a mutant raises is the answer
        broke = f"{type(error).__name__}: {error}".splitlines()[0][:80]
    print("\n" + json.dumps(watch.answer() | {"broke": broke}))


def measure(path: Path) -> Facts:
    """What ``probe`` says of one script, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.faults.mutation_harm", str(path)]
    done = subprocess.run(
        command, cwd=path.parent, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{path.name} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def verdict(original: Facts, mutant: Facts, rescale: float = 1.0) -> str:
    """The harm in words; it begins with ``harmless`` if no measure of the module's text applies.

    ``rescale``: the mutant's losses are multiplied by it, where the mistake changes their unit.
    """
    if mutant["broke"]:
        return f"stops: {mutant['broke']}"
    last = [_last_fifth(original["losses"]), [rescale * x for x in _last_fifth(mutant["losses"])]]
    ends = [statistics.fmean(x) if x else math.nan for x in last]
    course = f"loss {ends[0]:.3g} -> {ends[1]:.3g}" if original["losses"] else "no loss seen"
    if math.isfinite(ends[0]) and not math.isfinite(ends[1]):
        return course
    if original["finite"] and not mutant["finite"]:
        return f"weights not finite, {course}"
    for what, name in (("moved", "weights"), ("copies", "copied weights")):
        if mutant[what] < 0.5 * original[what]:
            return f"{mutant[what] / original[what]:.0%} of the {name} move, {course}"
    learnt = statistics.fmean(original["losses"][: max(len(original["losses"]) // 20, 1)] or [math.nan]) - ends[0]
    noise = math.sqrt(sum(statistics.variance(x) / len(x) for x in last if len(x) > 1))
    harmful = ends[1] - ends[0] > max(TOLERANCE * learnt, 3 * noise)
    return course if harmful else f"harmless: {course}"


def _last_fifth(values: Sequence[float]) -> list[float]:
    return list(values[-max(len(values) // 5, 1) :])


if __name__ == "__main__":
    probe(Path(sys.argv[1]).resolve())
