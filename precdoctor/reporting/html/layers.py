"""Orders the tensors of the page, and labels them, shortened to the width at hand."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile

from rich.cells import cell_len, set_cell_size

from precdoctor.diagnosis.claims.words import module_label, several_models
from precdoctor.diagnosis.survey.rows import FORWARD_KINDS
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.reporting.html.survey import Survey, TensorId
from precdoctor.reporting.text import clean
from precdoctor.runlog.schema import KINDS

#: Names of the kinds on the page, the most important first.
KIND_TITLES = {
    "output": "activations",
    "grad_output": "activation gradients",
    "weight_grad": "weight gradients",
    "weight": "weights",
    "weight_grad_step": "gradients given to the optimizer",
    "update": "weight updates",
    "input": "inputs made between modules",
    "batch": "batch",
    "loss": "loss",
    "opt_state": "optimizer state",
    "master_weight": "master weights",
    "buffer": "buffers",
    "logits": "logits of softmaxes",
    "kv_key": "cached keys",
    "kv_value": "cached values",
    "fp8_operand": "FP8 operands",
    "subbyte_operand": "FP4 and FP6 operands",
    "block_scale": "block scales",
}
#: Place of each kind on the page.
KIND_RANK = {kind: at for at, kind in enumerate(KIND_TITLES)}
#: Kinds whose values carry the loss scale.
SCALED_KINDS = ("grad_output", "weight_grad", "loss")
#: Longest label on the page, in the range map, and on a telephone, in columns of a monospaced font. Longer names are
#: shortened in the middle; tooltip, table and copied text have the whole name.
LABEL, MAP_LABEL, NARROW_LABEL = 42, 30, 22
#: Mark for the dropped middle of a name; a part that would be cut to fewer columns than the second is dropped.
_DROPPED, _LEAST = "…", 3
_PARTS = re.compile(r"[^. ]+[. ]*|[. ]+")
_RUN = re.compile("…{2,}")

assert set(KINDS) == set(KIND_TITLES)


def depth(view: RunView, survey: Survey) -> Mapping[tuple[str, str], float]:
    """The sort key of each layer: its place in the order of the forward pass, also for its gradients and weights.

    A module that no hook saw comes directly after the module before it in the module tree.
    """
    recorded: dict[tuple[str, str], float] = {}
    for at, tensor in enumerate(survey.tensors):
        order = survey.order(at)
        if tensor.kind in FORWARD_KINDS and order is not None:
            recorded[tensor.layer] = min(recorded.get(tensor.layer, order), float(order))
    places, last = dict(recorded), -1.0
    for layer in view.module_classes:
        if layer in recorded:
            last = recorded[layer]
        else:
            last += 1e-6
            places.setdefault(layer, last)
    end = max(places.values(), default=0.0)
    for at, tensor in enumerate(survey.tensors):
        places.setdefault(tensor.layer, end + 1.0 + at)
    return places


def in_order(view: RunView, survey: Survey, kinds: Sequence[str] | None = None) -> list[int]:
    """Indices of the tensors of ``kinds`` (None: all), ordered by kind, then by :func:`depth`."""
    places = depth(view, survey)
    chosen = [t for t in range(len(survey.tensors)) if kinds is None or survey.tensors[t].kind in kinds]

    def place(at: int) -> tuple[float, float, str, int]:
        tensor = survey.tensors[at]
        return (KIND_RANK.get(tensor.kind, len(KIND_RANK)), places[tensor.layer], tensor.name, tensor.call)

    return sorted(chosen, key=place)


def kind_title(kind: str) -> str:
    """The name of a kind of tensors on the page; the recorded word for a kind that is not known here."""
    return KIND_TITLES.get(kind, clean(kind, 40))


def labels(tensors: Sequence[TensorId]) -> list[str]:
    """The label of each tensor; it begins with the root if modules of several roots occur."""
    several = several_models((t.root, t.module) for t in tensors)
    return [label(t, several_roots=several) for t in tensors]


def label(tensor: TensorId, *, several_roots: bool = False) -> str:
    """The label of a tensor: ``blocks.3.proj.weight`` for a parameter or buffer, ``blocks.3.proj [0]`` for a leaf of an
    activation.

    The second call of a module in a step gets `` #2``, and so on; with ``several_roots`` the root comes first.
    """
    owned = tensor.kind not in (*FORWARD_KINDS, "grad_output", "loss")
    module = module_label(tensor.root, tensor.module, several=several_roots) or "loss"
    if tensor.name:
        module += f".{tensor.name}" if owned else f" [{tensor.name}]"
    return clean(f"{module} #{tensor.call + 1}" if tensor.call else module, 400)


def elided(names: Iterable[str], limit: int) -> dict[str, str]:
    """Shorten names to at most ``limit`` columns of a monospaced font, if possible without making two names equal.

    A common beginning is dropped first; numbers of layers and the last part are kept:
    ``model.transformer.h.11.attn.c_attn`` in 20 columns is ``…h.11.attn.c_attn``.

    Returns:
        The short form of each name.
    """
    unique = list(dict.fromkeys(names))
    start = _common_start(unique) if any(cell_len(name) > limit for name in unique) else ""
    short = {
        name: _elide(_DROPPED + name.removeprefix(start) if start and name.startswith(start) else name, limit)
        for name in unique
    }
    ways = (partial(_elide, from_end=True), partial(_elide_all, from_end=True), _middle)
    for cut in (partial(way, limit=limit) for way in ways):
        count = Counter(short.values())
        short |= {name: cut(name) for name, text in short.items() if count[text] > 1}
    return short


def _common_start(names: Sequence[str]) -> str:
    """The common beginning of all names with several parts; it ends before the first number and the last part."""
    leads = [parts[:-1] for parts in map(_PARTS.findall, names) if len(parts) > 1]
    shared = takewhile(lambda same: len(set(same)) == 1 and not _is_number(same[0]), zip(*leads, strict=False))
    return "".join(same[0] for same in shared) if len(leads) > 1 else ""


def _is_number(part: str) -> bool:
    return part.strip(". …").isdigit()


def _elide(name: str, limit: int, *, from_end: bool = False) -> str:
    """Drop parts, from the left or from the right, until the rest fits; keep the start of the last dropped part if it
    fits after a kept part.
    """
    parts = _PARTS.findall(name)
    if cell_len(name) <= limit:
        return name
    droppable = [at for at, part in enumerate(parts[:-1]) if not _is_number(part)]
    for at in reversed(droppable) if from_end else droppable:
        parts[at], whole = _DROPPED, parts[at]
        if cell_len(_joined(parts)) <= limit:
            room = limit - cell_len("".join(parts[:at]) + _joined(parts[at:]))
            if room >= _LEAST and (from_end or any(part != _DROPPED for part in parts[:at])):
                parts[at] = set_cell_size(whole, min(room, cell_len(whole) - 1)).rstrip(". ") + _DROPPED
            return _joined(parts)
    return _elide_all(name, limit, from_end=from_end)


def _elide_all(name: str, limit: int, *, from_end: bool = False) -> str:
    """As :func:`_elide`, after shortening the last part to half of the limit."""
    *before, last = _PARTS.findall(name)
    shorter = _middle(last, limit // 2)
    if not before or shorter == last:
        return _middle(name, limit)
    return _elide("".join([*before, shorter]), limit, from_end=from_end)


def _joined(parts: Sequence[str]) -> str:
    return _RUN.sub(_DROPPED, "".join(parts))


def _middle(text: str, limit: int) -> str:
    """Drop the middle of ``text``; the end keeps twice as many columns as the beginning."""
    if cell_len(text) <= limit:
        return text
    tail = (limit - 1) * 2 // 3
    start, end = set_cell_size(text, limit - 1 - tail), set_cell_size(text[::-1], tail)[::-1]
    return f"{start.rstrip()}{_DROPPED}{end.lstrip()}"
