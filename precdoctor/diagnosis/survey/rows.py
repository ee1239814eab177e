"""A row of the ``tensors`` table as a typed value, and the location and evidence that findings build from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from precdoctor.diagnosis.claims.finding import Location, Phase, Source
from precdoctor.diagnosis.claims.words import module_label, non_finite, plural, several_models
from precdoctor.diagnosis.survey.processes import Process
from precdoctor.errors import UsageError
from precdoctor.numerics.formats import Format, Kind, format_of_dtype
from precdoctor.numerics.histogram import ExponentHistogram

FORWARD_KINDS = ("batch", "input", "output")
BACKWARD_KINDS = ("grad_output", "weight_grad")
#: Non-finite values in these are incidents; a non-finite activation alone is evidence.
TRIGGER_KINDS = ("loss", "weight_grad", "weight_grad_step", "weight", "update")
#: Most tensors in a path, the finding's own included.
PATH_LENGTH = 8

#: What identifies a tensor across steps: root, module, kind, name, call.
Key = tuple[str, str, str, str, int]
#: What identifies a weight: root, module, name.
Parameter = tuple[str, str, str]

_K = TypeVar("_K", bound=Hashable)
_V = TypeVar("_V")


def grouped(pairs: Iterable[tuple[_K, _V]]) -> dict[_K, list[_V]]:
    """Return the values of each key, in the order of ``pairs``; keys in the order in which they first occur."""
    groups: dict[_K, list[_V]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def number(value: Any) -> float | None:
    """Return ``value`` as a float; None for every spelling of "missing" (None, NA, NaN of a nullable column)."""
    if value is None:  # the most frequent case; an exception takes ten times as long
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):
        return None
    return None if math.isnan(result) else result


def integer(value: Any) -> int | None:
    """Return ``value`` as an int; None if it is missing or infinite."""
    if type(value) is int:
        return value
    result = number(value)
    return None if result is None or math.isinf(result) else int(result)


def text(value: Any) -> str:
    """Return ``value`` if it is a string, else the empty string."""
    return value if isinstance(value, str) else ""


def source_of(event: Mapping[str, Any]) -> Source | None:
    """Return the source line in an event, or in an op of its data; None if it has none."""
    line = integer(event.get("line"))
    file = text(event.get("file"))
    return Source.read(file, line, text(event.get("code"))) if file and line is not None else None


def parameter_in(key: Key) -> Parameter:
    """Return root, module and name of a key: the weight that a gradient or an update belongs to."""
    root, module, _, name, _ = key
    return root, module, name


def dotted(module: str, name: str) -> str:
    """Return ``blocks.0.weight``, the name of a weight below its root."""
    return f"{module}.{name}".strip(".")


def known_format(dtype: str) -> Format | None:
    """Return the floating-point format of a logged dtype; None for integers and unknown dtypes."""
    try:
        fmt = format_of_dtype(dtype)
    except UsageError:
        return None
    return fmt if fmt.kind is Kind.FLOAT else None


def _count(value: Any) -> int:
    return integer(value) or 0


#: How a :class:`TensorRow` reads the value of each column.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("step", "rank", "numel", "nan", "pos_inf", "neg_inf"), int),
    **dict.fromkeys(("attempt", "call", "zero", "subnormal", "at_max"), _count),
    **dict.fromkeys(("order", "first_bad_order", "first_bad_micro_step"), integer),
    **dict.fromkeys(("root", "module", "module_class", "kind", "name", "phase", "dtype"), text),
    **dict.fromkeys(("amax", "amin_nonzero", "sum", "sum_sq", "scale"), number),
}
#: The columns of the ``tensors`` table that a :class:`TensorRow` is built from.
ROW_COLUMNS = (*(name for name in _READERS if name != "attempt"), "shape", "exp_lo", "exp_hist")


@dataclass(frozen=True)
class TensorRow:
    """One tensor at one step; the fields are columns of the ``tensors`` table (see ``runlog.schema``)."""

    step: int
    rank: int
    attempt: int
    root: str
    module: str
    module_class: str
    kind: str
    name: str
    call: int
    phase: str
    dtype: str
    shape: tuple[int, ...]
    numel: int
    first_bad_micro_step: int | None
    order: int | None
    first_bad_order: int | None
    nan: int
    pos_inf: int
    neg_inf: int
    zero: int
    subnormal: int
    at_max: int
    amax: float | None
    amin_nonzero: float | None
    sum: float | None
    sum_sq: float | None
    histogram: ExponentHistogram
    scale: float | None
    #: Whether the run has several models: messages then write the root before the module.
    qualified: bool = False

    @classmethod
    def of(cls, record: Mapping[str, Any], *, qualified: bool = False) -> TensorRow:
        """Build a row from a record with at least the columns :data:`ROW_COLUMNS`."""
        shape, exponents = record.get("shape"), record.get("exp_hist")
        return cls(
            **{name: read(record.get(name)) for name, read in _READERS.items()},
            shape=() if shape is None or isinstance(shape, float) else tuple(int(n) for n in shape),
            histogram=ExponentHistogram.of(
                integer(record.get("exp_lo")), exponents if hasattr(exponents, "__len__") else None
            ),
            qualified=qualified,
        )

    @property
    def key(self) -> Key:
        """The identity of the tensor, the same on every step and rank."""
        return (self.root, self.module, self.kind, self.name, self.call)

    @property
    def layer(self) -> tuple[str, str]:
        """Root and module."""
        return (self.root, self.module)

    @property
    def owner(self) -> Parameter:
        """Root, module and name: the same for a weight, its gradient and its update."""
        return (self.root, self.module, self.name)

    @property
    def inf(self) -> int:
        """Number of infinities of both signs."""
        return self.pos_inf + self.neg_inf

    @property
    def non_finite(self) -> int:
        """Number of NaN and infinities."""
        return self.nan + self.pos_inf + self.neg_inf

    @property
    def bad(self) -> bool:
        """Whether the tensor holds a NaN or an infinity."""
        return self.non_finite > 0

    @property
    def is_zero(self) -> bool:
        """Whether every element is exactly zero."""
        return self.zero == self.numel

    @property
    def mask_like(self) -> bool:
        """Whether ``-inf`` is the only non-finite value, as in an additive attention mask."""
        return self.neg_inf > 0 and self.nan == 0 and self.pos_inf == 0

    @property
    def badness(self) -> frozenset[str]:
        """The kinds of non-finite values in the tensor: ``nan``, ``pos_inf``, ``neg_inf``."""
        counts = {"nan": self.nan, "pos_inf": self.pos_inf, "neg_inf": self.neg_inf}
        return frozenset(name for name, count in counts.items() if count)

    @property
    def process(self) -> Process:
        """The process that recorded the row."""
        return Process(self.rank, self.attempt)

    @property
    def position(self) -> float:
        """Execution order of the first non-finite call (for a finite row: of the first call); infinity if unknown."""
        order = self.first_bad_order if self.bad and self.first_bad_order is not None else self.order
        return math.inf if order is None else float(order)

    @property
    def headroom(self) -> float | None:
        """Binades between amax and the dtype's maximum; None for integers and without a non-zero finite element."""
        fmt = known_format(self.dtype)
        return fmt.headroom(self.amax) if fmt is not None and self.amax else None

    @property
    def rms(self) -> float | None:
        """Root mean square of the finite elements; None without any."""
        finite = self.numel - self.non_finite
        return math.sqrt(self.sum_sq / finite) if self.sum_sq is not None and finite > 0 else None

    @property
    def place(self) -> str:
        """The module, after its root if the run has several models; the root itself for the root's own tensors."""
        own = f"{self.root}.{self.module}" if self.qualified and self.module and self.root else self.module
        return own or self.root or "the loss"

    @property
    def parameter(self) -> str:
        """A weight's module and name: ``blocks.0.weight``."""
        return dotted(self.module, self.name)

    @property
    def label(self) -> str:
        """The tensor's name in messages: ``blocks.3.attn.proj output``."""
        if self.kind == "loss":
            return "the loss"
        if self.kind == "opt_state" and self.name:
            parameter, _, state = self.name.rpartition(".")
            owner = dotted(self.place if self.module else "", parameter)
            return f"state `{state}` of `{owner or self.place}`"
        what = {"grad_output": "gradient of the output", "weight_grad": "gradient", "weight_grad_step": "gradient"}
        what["fp8_operand"] = "FP8 operand"
        place = [f"`{self.place}`"] if self.module or self.root else []
        words = [*place, what.get(self.kind, self.kind), *([f"`{self.name}`"] if self.name else [])]
        return " ".join(words if place else [*words, "outside of modules"])

    def count_words(self) -> str:
        """Return the count of non-finite values in words: ``12 NaN and 3 Inf of 4096 elements``."""
        counts = non_finite(self.nan, self.pos_inf, self.neg_inf) or "no non-finite value"
        return f"{counts} of {plural(self.numel, 'element')}"


def location(row: TensorRow | None, phase: Phase, process: Process, step: int) -> Location:
    """Return the location of a finding about ``row``, or about the whole run if it is None."""
    if row is None:
        return Location(phase=phase, step=step, **vars(process))
    return tensor_location((row.root, row.module), row.module_class, row.kind, phase, process, step)


def tensor_location(
    place: Parameter | Key | tuple[str, str], module_class: str, kind: str, phase: Phase, process: Process, step: int
) -> Location:
    """Return the location of a finding about a tensor; ``place`` begins with root and module."""
    return Location(place[0], place[1], module_class or None, kind, phase, step=step, **vars(process))


def range_evidence(row: TensorRow) -> dict[str, Any]:
    """Return the ``range`` entry of a finding's evidence, which has a fixed shape."""
    return {
        "dtype": row.dtype,
        "amax": row.amax,
        "amin_nonzero": row.amin_nonzero,
        "exp_lo": row.histogram.lo,
        "exp_hist": row.histogram.counts.tolist(),
    }


def path_evidence(rows: Sequence[TensorRow]) -> list[dict[str, Any]]:
    """Return the ``path`` entry of a finding: the last :data:`PATH_LENGTH` of ``rows``, which are in order.

    If they belong to several models, a module's FQN follows its root.
    """
    shown = rows[-PATH_LENGTH:]
    several = several_models((row.root, row.module) for row in shown)
    return [
        {
            "module": module_label(row.root, row.module, several=several),
            "kind": row.kind,
            "name": row.name,
            "dtype": row.dtype,
            "order": row.order,
            "amax": row.amax,
            "headroom_binades": row.headroom,
            "nan": row.nan,
            "inf": row.inf,
        }
        for row in shown
    ]


def tensor_evidence(row: TensorRow | None, rows: Sequence[TensorRow] = ()) -> dict[str, Any]:
    """Return the ``range`` and ``path`` (out of ``rows``) entries of a finding about ``row``; empty if it is None."""
    return {} if row is None else {"range": range_evidence(row), "path": path_evidence(path_to(rows, row))}


def gradient_evidence(rows: Sequence[TensorRow], gradient: TensorRow) -> dict[str, Any]:
    """Return the ``range`` and ``path`` entries of a finding about a gradient; the path: loss and output gradients."""
    return tensor_evidence(gradient, [r for r in rows if r.kind in ("loss", "grad_output")])


def path_to(rows: Sequence[TensorRow], target: TensorRow) -> list[TensorRow]:
    """Return the last tensors in execution order up to and including ``target``; only ``target`` if its order is
    unknown.
    """
    if target.order is None:
        return [target]
    before = [r for r in rows if r.order is not None and r.order < target.order]
    before.sort(key=lambda r: r.order or 0)
    return [*before[-(PATH_LENGTH - 1) :], target]
