"""16-bit buffers that are still written to and no longer change: counts, and the running statistics of a norm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from precdoctor.diagnosis.survey.parameters import HALF
from precdoctor.diagnosis.survey.rows import known_format, number, text
from precdoctor.diagnosis.survey.view import Process, RunView

_COLUMNS = ("root", "module", "module_class", "name", "dtype", "numel", "nan", "pos_inf", "neg_inf", "amax", "sum",
            "amin_nonzero", "fingerprint")  # fmt: skip
#: As torch's batch norms name them.
_PARTNER = {"running_var": "running_mean", "running_mean": "running_var"}
Place = tuple[str, str, str]


@dataclass
class Buffer:
    """A buffer on the recorded steps on which somebody had written to it since the last one."""

    dtype: str
    module_class: str
    numel: int
    process: Process
    #: By step: fingerprint, sum, amax; and whether all elements are equal and whole, as counts are.
    seen: dict[int, tuple[float, float, float, bool]] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Its largest element, at last."""
        return self.seen[max(self.seen)][2]

    @property
    def idle(self) -> int:
        """Recorded writes since the last that changed a bit."""
        prints = [self.seen[s][0] for s in sorted(self.seen, reverse=True)]
        return next((i for i, p in enumerate(prints) if p != prints[0]), len(prints)) - 1

    @property
    def changes(self) -> int:
        """Recorded writes that changed a bit."""
        prints = [self.seen[s][0] for s in sorted(self.seen)]
        return sum(a != b for a, b in pairwise(prints))

    @property
    def last_change(self) -> int:
        """The step of the write that still changed it."""
        return sorted(self.seen)[-1 - self.idle]

    def is_swamped_count(self) -> bool:
        """Whether it rose by one whole step after another, up to where half an ulp is a step, and there it stays.

        A sum of ones stalls at 2^(m+1), m the stored bits of the significand: 256 in BF16, 2048 in FP16; of terms of d,
        at d times that. Adding several times between two recorded steps shows as a larger rise, so that ones are tried
        as well as the smallest rise.
        """
        fmt = known_format(self.dtype)
        moving = sorted(self.seen)[: len(self.seen) - self.idle]
        sums = [self.seen[s][1] / self.numel for s in moving]
        rises = [b - a for a, b in pairwise(sums)]
        if fmt is None or len(rises) < 2 or min(rises) <= 0.0 or not all(s[3] for s in self.seen.values()):
            return False
        stalls = 2.0 ** (fmt.mantissa_bits + 1)
        return self.value in (stalls, stalls * min(rises))


def stalled_counts(view: RunView, min_writes: float) -> Mapping[Place, Buffer]:
    """Counts in 16-bit buffers that have not moved for ``min_writes`` writes."""
    return {p: b for p, b in _survey(view).items() if b.idle >= min_writes and b.is_swamped_count()}


def running_statistics(view: RunView, min_writes: float) -> Mapping[Place, Buffer]:
    """Running means and variances that were written to ``min_writes`` times or more, beside a partner that changes.

    With a momentum of 0, or in evaluation, neither of the two would.
    """
    buffers = _survey(view)
    found = {}
    for (root, module, name), buffer in buffers.items():
        partner = buffers.get((root, module, _PARTNER.get(name, "")))
        if partner is not None and partner.changes and len(buffer.seen) > min_writes:
            found[root, module, name] = buffer
    return found


def _survey(view: RunView) -> Mapping[Place, Buffer]:
    """All 16-bit buffers of the first process that has them."""
    return view.remember("narrow-buffers", lambda: _read(view))


def _read(view: RunView) -> dict[Place, Buffer]:
    found: dict[Place, Buffer] = {}
    for r in view.scan_records(_COLUMNS, ("buffer",), where=[("dtype", "in", HALF)]):
        stamp, total, amax, least = (number(r[c]) for c in ("fingerprint", "sum", "amax", "amin_nonzero"))
        if stamp is None or total is None or amax is None or r["nan"] or r["pos_inf"] or r["neg_inf"]:
            continue
        place = (text(r["root"]), text(r["module"]), text(r["name"]))
        process = Process(int(r["rank"]), int(r["attempt"]))
        new = Buffer(str(r["dtype"]), text(r["module_class"]), max(1, int(r["numel"])), process)
        buffer = found.setdefault(place, new)
        if buffer.process == process:
            counts = (not amax or least == amax) and amax == int(amax)
            buffer.seen[int(r["step"])] = (stamp, total, amax, counts)
    return found
