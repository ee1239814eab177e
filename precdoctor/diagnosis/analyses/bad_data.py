"""Tensors that were non-finite before the model read them: which field, sample and column, and what to do.

Only a tensor seen at a data loader is known to be bad data. Any other was non-finite when the model was called: it came
with the data, or code between loader and model made it non-finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from precdoctor.diagnosis.analyses.operand import Operand
from precdoctor.diagnosis.claims.finding import Prescription
from precdoctor.diagnosis.claims.words import non_finite, plural
from precdoctor.diagnosis.survey.rows import TensorRow

#: Most samples that a message lists by number.
_LISTED = 8


@dataclass(frozen=True)
class BadTensor:
    """A non-finite tensor of the data.

    Attributes:
        name: its name in a sentence: "`labels`", "field 0", "argument 1"; empty if the data is one tensor.
        counts: number of elements that are NaN, +Inf and -Inf.
        numel: number of elements.
        first_bad: index of the first non-finite element; None if unknown.
        bad_samples: number of samples with a non-finite element in the batch.
        indices: indices of the first of these samples in the data set; empty if unknown.
        in_order: whether the indices are certain: no custom ``collate_fn`` may have changed the order.
        rows: whether the first dimension counts something other than samples, such as the nodes of several graphs.
        delivered: whether it was non-finite when a data loader delivered it.
    """

    name: str
    counts: tuple[int, int, int]
    numel: int
    first_bad: tuple[int, ...] | None
    bad_samples: int = 0
    indices: tuple[int, ...] = ()
    in_order: bool = False
    rows: bool = False
    delivered: bool = False

    @property
    def bad(self) -> int:
        """The number of non-finite elements."""
        return sum(self.counts)

    @property
    def held(self) -> str:
        """``a NaN``, ``12 NaN and 1 +Inf``."""
        words = non_finite(*self.counts)
        if self.bad != 1:
            return words
        return "a NaN" if self.counts[0] else words.replace("1", "one")

    @property
    def where(self) -> str:
        """The place of the first non-finite element: ``sample 137 of the data set, column 5 of `features` ``."""
        if not self.first_bad:
            return self.name or "a single number"
        first, *rest = self.first_bad
        name = self.name if self.delivered else ""  # else the sentence begins with the name
        if self.indices and self.in_order:
            sample = f"sample {self.indices[0]} of the data set"
        else:
            sample = f"row {first}" if self.rows else f"sample {first} of the batch"
        element = f"column {rest[0]}" if len(rest) == 1 else f"element {rest}" if rest else ""
        inside = " of ".join(filter(None, (element, name)))
        inside = f"in {inside}" if inside and not element else inside
        return ", ".join(filter(None, (sample, inside)))

    def title(self, reader: str) -> str:
        """Return the title of a finding; ``reader`` names what reads the tensor."""
        several = f" in {plural(self.bad_samples, 'row' if self.rows else 'sample')}" if self.bad_samples > 1 else ""
        begins = "" if self.bad == 1 else "first in " if not several else "the first in "
        where = f": {begins}{self.where}" if self.delivered or self.first_bad else ""
        if self.delivered:
            return f"the input data holds {self.held}{several}{where}"
        return f"{self.name or 'the batch'} held {self.held} before {reader} read it{where}"

    @property
    def more(self) -> str:
        """The bad samples by index, at most eight; empty if unknown, or if the title already names the only one."""
        if not self.indices:
            return ""
        listed = ", ".join(map(str, self.indices[:_LISTED])) + (", ..." if self.bad_samples > _LISTED else "")
        which = "The sample has index" if self.bad_samples == 1 else "The samples have indices"
        words = f"{which} {listed} in the data set"
        if not self.in_order:
            return f" {words}, unless `collate_fn` changes the order."
        return f" {words}." if len(self.indices) > 1 else ""


def as_read(name: str, operand: Operand) -> BadTensor:
    """Return the tensor ``name``, as an op of a replay read it."""
    return BadTensor(name, (operand.nan, operand.pos_inf, operand.neg_inf), operand.numel, operand.first_bad)


def as_given(row: TensorRow) -> BadTensor:
    """Return an argument of a model, from its row."""
    return BadTensor(
        field_words(row.name or "0", "argument"), (row.nan, row.pos_inf, row.neg_inf), row.numel, first_bad=None
    )


def field_words(path: str, what: str) -> str:
    """Return ``field 0`` (``what="field"``) or `` `labels` `` for a path such as ``0``, ``labels``, ``0.labels``."""
    position, _, rest = path.partition(".")
    path = rest if position.isdecimal() and rest and not rest.isdecimal() else path
    return f"{what} {path}" if path.isdecimal() else f"`{path}`" if path else ""


def delivered_tensor(fields: Sequence[BadTensor], read: BadTensor) -> BadTensor | None:
    """Return the delivered tensor that an op read: same counts, else same first bad sample; None without a match."""
    same = [f for f in fields if f.counts == read.counts]
    here = [f for f in fields if f.first_bad and read.first_bad and f.first_bad[0] == read.first_bad[0]]
    return next((f for f in same if f.numel == read.numel), next(iter([*same, *here]), None))


def mend_data(data: BadTensor, step: int, *, prepared: bool = True) -> Prescription:
    """Prescribe to drop or impute the bad samples; if the data may be sound, to check that first.

    ``prepared``: whether torch code between data loader and model may have made the values.
    """
    return drop_samples(data, step) if data.delivered or not prepared else _find_maker(data, step)


def _find_maker(data: BadTensor, step: int) -> Prescription:
    """Prescribe to check the batch before any code computes with it: if it is finite, that code is at fault."""
    return Prescription(
        title=f"check the data as it comes at step {step}: drop or impute what is non-finite there; if all of it is "
        "finite, code between the data and the model is at fault: a traced second run names its line",
        change={"check": "isfinite", "step": step},
        predicted={"stops_at_step": step, "nonfinite_elements": data.bad},
        snippet=(
            "import torch\n\n"
            "# before any code computes with the batch; behind it, look for divisions by 0 and logs of 0\n"
            "bad = ~torch.isfinite(batch).flatten(1).all(dim=1)\n"
            "if bad.any():\n"
            "    where = bad.nonzero().flatten().tolist()\n"
            "    raise ValueError(f'non-finite samples: {where}')\n"
        ),
    )


def drop_samples(data: BadTensor, step: int) -> Prescription:
    """Prescribe to drop or impute the bad samples."""
    certain = data.indices and data.in_order
    listed = ", ".join(map(str, data.indices[:_LISTED]))
    which = (
        f"{'sample' if data.bad_samples == 1 else 'samples'} {listed} of the data set" if certain else "such samples"
    )
    return Prescription(
        title=f"drop or impute {which}; look for missing values, failed parsing and a standard deviation of 0 "
        f"(the batch of step {step} holds {plural(data.bad, 'such element')})",
        change={"filter": "isfinite", **({"samples": list(data.indices)} if certain else {})},
        predicted={"nonfinite_elements": {"from": data.bad, "to": 0}},
        snippet=_OF_DATA_SET if data.indices else _OF_BATCH,
    )


_OF_DATA_SET = (
    "import torch\n"
    "from torch.utils.data import Subset\n\n\n"
    "def is_finite(sample):\n"
    "    fields = sample.values() if isinstance(sample, dict) else sample\n"
    "    return all(torch.as_tensor(x).isfinite().all() for x in fields)\n\n\n"
    "good = [i for i in range(len(dataset)) if is_finite(dataset[i])]\n"
    "print('dropped samples', sorted(set(range(len(dataset))) - set(good)))\n"
    "dataset = Subset(dataset, good)\n"
)
_OF_BATCH = (
    "import torch\n\n"
    "finite = torch.isfinite(batch).flatten(1).all(dim=1)\n"
    "if not finite.all():\n"
    "    print('dropped samples', (~finite).nonzero().flatten().tolist())\n"
    "batch, target = batch[finite], target[finite]\n"
)
