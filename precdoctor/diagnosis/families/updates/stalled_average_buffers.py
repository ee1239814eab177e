"""PD507, buffers: 16-bit counts and running statistics of norms that are still written to and no longer change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from precdoctor.diagnosis.survey.parameters import HALF
from precdoctor.diagnosis.survey.rows import Parameter, known_format, number, parameter_of, text
from precdoctor.diagnosis.survey.view import Process, RunView, process_step

_COLUMNS = ("root", "module", "module_class", "name", "dtype", "numel", "nan", "pos_inf", "neg_inf", "amax", "sum",
            "amin_nonzero", "fingerprint")  # fmt: skip
#: Running statistics of torch's norms, each with the other of its norm.
_PARTNER = {"running_var": "running_mean", "running_mean": "running_var"}


@dataclass
class Buffer:
    """A buffer on the recorded steps before which the script wrote to it."""

    dtype: str
    module_class: str
    numel: int
    process: Process
    #: By step: fingerprint, sum, amax, and whether all elements are equal whole numbers, as in a count.
    seen: dict[int, tuple[float, float, float, bool]] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """Its largest element on the last step."""
        return self.seen[max(self.seen)][2]

    @property
    def idle(self) -> int:
        """Number of recorded writes since the last one that changed a bit."""
        prints = [self.seen[s][0] for s in sorted(self.seen, reverse=True)]
        return next((i for i, p in enumerate(prints) if p != prints[0]), len(prints)) - 1

    @property
    def changes(self) -> int:
        """Number of recorded writes that changed a bit."""
        prints = [self.seen[s][0] for s in sorted(self.seen)]
        return sum(a != b for a, b in pairwise(prints))

    @property
    def last_change(self) -> int:
        """Step of the last write that changed it."""
        return sorted(self.seen)[-1 - self.idle]

    def is_swamped_count(self) -> bool:
        """Whether it rose from write to write up to the value at which half an ulp is one term, and stays there.

        A sum of ones stalls at 2^(m+1), m the stored bits of the significand: 256 in BF16, 2048 in FP16; a sum of terms
        d at d times that. Several additions between two recorded steps look like one larger rise, so both one and the
        smallest rise are tried as the term.
        """
        fmt = known_format(self.dtype)
        moving = sorted(self.seen)[: len(self.seen) - self.idle]
        sums = [self.seen[s][1] / self.numel for s in moving]
        rises = [b - a for a, b in pairwise(sums)]
        if fmt is None or len(rises) < 2 or min(rises) <= 0.0 or not all(s[3] for s in self.seen.values()):
            return False
        stalls = 2.0 ** (fmt.mantissa_bits + 1)
        return self.value in (stalls, stalls * min(rises))


def stalled_counts(view: RunView, min_writes: float) -> Mapping[Parameter, Buffer]:
    """Counts in 16-bit buffers that have not moved for ``min_writes`` writes."""
    return {p: b for p, b in _survey(view).items() if b.idle >= min_writes and b.is_swamped_count()}


def running_statistics(view: RunView, min_writes: float) -> Mapping[Parameter, Buffer]:
    """Running means and variances with ``min_writes`` writes or more, beside a partner that changes.

    With a momentum of 0, or in evaluation, neither of the two would change.
    """
    buffers = _survey(view)
    found = {}
    for (root, module, name), buffer in buffers.items():
        partner = buffers.get((root, module, _PARTNER.get(name, "")))
        if partner is not None and partner.changes and len(buffer.seen) > min_writes:
            found[root, module, name] = buffer
    return found


def _survey(view: RunView) -> Mapping[Parameter, Buffer]:
    """All 16-bit buffers of the first process that has them."""
    return view.remember("narrow-buffers", lambda: _read(view))


def _read(view: RunView) -> dict[Parameter, Buffer]:
    found: dict[Parameter, Buffer] = {}
    for r in view.scan_records(_COLUMNS, ("buffer",), where=[("dtype", "in", HALF)]):
        stamp, total, amax, least = (number(r[c]) for c in ("fingerprint", "sum", "amax", "amin_nonzero"))
        if stamp is None or total is None or amax is None or r["nan"] or r["pos_inf"] or r["neg_inf"]:
            continue
        place, (process, step) = parameter_of(r), process_step(r)
        new = Buffer(str(r["dtype"]), text(r["module_class"]), max(1, int(r["numel"])), process)
        buffer = found.setdefault(place, new)
        if buffer.process == process:
            counts = (not amax or least == amax) and amax == int(amax)
            buffer.seen[step] = (stamp, total, amax, counts)
    return found
