"""The truth about every script of the corpus: read from ``truth/*.toml``, resolved against the scripts."""

from __future__ import annotations

import ast
import dataclasses
import os
from pathlib import Path
from typing import Any

from precdoctor.runlog.toml import read_toml

HERE = Path(__file__).parent
SCRIPTS = HERE / "scripts"
#: Folders of scripts, each with its truth: the family of the code that names the fault, or none.
SUBJECTS = ("nonfinite", "underflow", "loss_scaling", "fp8", "updates", "growth", "configuration", "healthy")
#: The sets that the scripts were written in; README.md has their provenance.
NAN_SETS = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth")
#: Sets of faults that leave the loss finite. They are asked other questions.
QUIET_SETS = (
    "quiet",
    "extension",
    "quiet2",
    "quiet3",
    "quiet4",
    "quiet5",
    "quiet6",
    "quiet7",
    "silent",
    "silent2",
    "silent3",
    "silent4",
    "silent5",
    "silent6",
    "silent7",
    "silent8",
    "silent9",
    "silent10",
    "silent11",
    "silent12",
    "silent13",
    "silent14",
    "silent15",
    "silent16",
    "silent17",
)
#: Sets with faults of both kinds: those that make a non-finite value have a ``phase``.
MIXED_SETS = ("library",)
SETS = NAN_SETS + QUIET_SETS + MIXED_SETS

#: Causes of non-finite values, and the phases they arise in.
CAUSES = (
    "log-of-nonpositive",
    "sqrt-of-negative",
    "division-by-zero",
    "zero-times-inf",
    "inf-minus-inf",
    "exp-overflow",
    "matmul-overflow",
    "reduction-overflow",
    "square-overflow",
    "cast-overflow",
    "softmax-fully-masked",
    "domain-error",
    "sqrt-gradient-at-zero",
    "norm-gradient-at-zero",
    "where-gradient-trap",
    "domain-edge-gradient",
    "nonfinite-input-batch",
    "extreme-input-batch",
    "nonfinite-weights",
    "optimizer-division-by-zero",
    "optimizer-overflow",
    "loss-scale-overflow",
    "other",
)
PHASES = ("data", "forward", "loss", "backward", "optimizer")
PRECISIONS = ("fp32", "bf16", "fp16", "fp16+scaler")


@dataclasses.dataclass(frozen=True)
class Truth:
    """One script. Of a healthy one only the first fields are set."""

    #: The subject and the file's name, which no other script of the corpus has.
    name: str
    #: One of ``SETS``.
    set_name: str
    architecture: str
    precision: str = "fp32"
    #: accumulation | checkpointing | compile | ...
    setting: tuple[str, ...] = ()
    #: Why a healthy script looks alarming.
    healthy: str | None = None
    #: What was done to a faulty one.
    fault: str | None = None
    code: str | None = None
    phase: str | None = None
    #: Class of the root module; None for code outside modules.
    root: str | None = None
    #: FQN below the root.
    module: str = ""
    op: str | None = None
    also_op: tuple[str, ...] = ()
    #: For a fault in the backward pass: the op whose gradient it is.
    forward_op: str | None = None
    #: The file below ``scripts``, if it is not the script itself, and the statement (one line of it, unique there).
    file: str | None = None
    text: str | None = None
    #: First words of other statements that are as right.
    also_text: tuple[str, ...] = ()
    cause: str | None = None
    also_cause: tuple[str, ...] = ()
    #: The optimizer-step attempt, from 0, in which the first harmful non-finite value is made.
    step: int | None = None

    # -- of the quiet sets only ----------------------------------------------------------------------------------------
    #: Codes that are as right.
    also_code: tuple[str, ...] = ()
    #: FQNs below ``root`` (or any root), as patterns; any of them is a right answer. Empty: no module is at fault.
    modules: tuple[str, ...] = ()
    #: What the oracle measures, ``modules.<gauge>`` or ``run.<gauge>``, and where, if not in every one of ``modules``.
    gauge: str | None = None
    where: tuple[str, ...] = ()
    #: Between which values it must lie in the script and in its twin.
    script_range: tuple[float, float] = (0.0, 0.0)
    twin_range: tuple[float, float] = (0.0, 0.0)
    #: The twin is the script with these texts replaced; without any it is the script in FP64.
    mend: tuple[tuple[str, str], ...] = ()
    probe: str | None = None
    #: How much higher the loss ends than that of the twin, at least.
    costs: float | None = None
    #: The loss of a healthy script need not fall.
    swings: bool = False

    @property
    def quiet(self) -> bool:
        return self.set_name in QUIET_SETS or (self.set_name in MIXED_SETS and self.phase is None)

    @property
    def script(self) -> Path:
        return SCRIPTS / f"{self.name}.py"

    @property
    def source(self) -> Path:
        return SCRIPTS / self.file if self.file else self.script

    @property
    def faulty(self) -> bool:
        return self.healthy is None

    @property
    def ops(self) -> set[str]:
        """Base names of every op that is a right answer."""
        return {base_name(o) for o in (self.op, self.forward_op, *self.also_op) if o}

    @property
    def causes(self) -> set[str]:
        return {c for c in (self.cause, *self.also_cause) if c}

    @property
    def codes(self) -> set[str]:
        return {c for c in (self.code, *self.also_code) if c}

    def lines(self) -> list[int]:
        """The lines of the statements that ``text`` and ``also_text`` begin; empty where the truth has none.

        Raises:
            ValueError: a text is not exactly once in the file.
        """
        return sorted({n for text in (self.text, *self.also_text) if text for n in self._statement(text)})

    def _statement(self, text: str) -> range:
        code = self.source.read_text()
        hits = [i for i, line in enumerate(code.splitlines(), 1) if line.strip().startswith(text)]
        if len(hits) != 1:
            raise ValueError(f"{self.name}: {text!r} is in {self.source.name} {len(hits)} times")
        spans = [
            range(node.lineno, (node.end_lineno or node.lineno) + 1)
            for node in ast.walk(ast.parse(code))
            if isinstance(node, ast.stmt) and node.lineno <= hits[0] <= (node.end_lineno or node.lineno)
        ]
        return min(spans, key=len)


def base_name(op: str) -> str:
    """``aten._foreach_addcdiv_.ScalarList`` -> ``addcdiv``: an op without overload, in-place and foreach variants."""
    name = op.rpartition("::")[2].removeprefix("aten.").split(".")[0]
    return name.removeprefix("_foreach_").strip("_")


def load(set_name: str = "all", only: str | None = None) -> list[Truth]:
    """The truth of one set, of all about non-finite values (``all``) or of ``every`` one, set by set.

    ``only`` picks names by substring.
    """
    wanted = {"all": NAN_SETS, "every": SETS}.get(set_name, (set_name,))
    found = []
    for subject in SUBJECTS:
        for key, facts in read_toml(HERE / "truth" / f"{subject}.toml", 1 << 24).items():
            values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
            found.append(Truth(name=key, set_name=values.pop("set"), **values))
    found = [t for t in found if t.set_name in wanted and (only is None or only in t.name)]
    return sorted(found, key=lambda t: SETS.index(t.set_name))


def environment() -> dict[str, str]:
    """The environment every script runs in: one thread, because results differ in the last bits with their number."""
    root = str(HERE.parents[1])
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "NO_COLOR": "1"}
