"""Modules that changed their names between two runs, matched by what they are: class, shapes and place in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from typing import TYPE_CHECKING

from precdoctor.diagnosis.survey.rows import Key

if TYPE_CHECKING:
    from precdoctor.comparison.baseline import Expected
    from precdoctor.comparison.summary import Summary

#: Root and FQN of a module.
Module = tuple[str, str]
#: Module class, and per tensor its kind, name and shape: what survives a renaming.
_Signature = tuple[str, tuple[tuple[str, str, tuple[int, ...]], ...]]


def renamed(found: Mapping[Key, Summary], expected: Mapping[Key, Expected]) -> dict[Module, Module]:
    """Modules of ``found`` that go by another name in ``expected``.

    Modules that only one of the two has are aligned in the order in which they were first recorded; a pair must have
    the same class and the same tensors of the same shapes. What has no such partner stays unmatched.
    """
    ours, theirs = _signatures(found), _signatures(expected)
    alone = [m for m in ours if m not in theirs]
    missing = [m for m in theirs if m not in ours]
    matcher = SequenceMatcher(None, [ours[m] for m in alone], [theirs[m] for m in missing], autojunk=False)
    pairs: dict[Module, Module] = {}
    for block in matcher.get_matching_blocks():
        for offset in range(block.size):
            pairs[alone[block.a + offset]] = missing[block.b + offset]
    return pairs


def translated(table: Mapping[Key, Summary], names: Mapping[Module, Module]) -> dict[Key, Summary]:
    """``table`` with its modules under their other names."""
    return {translate(key, names): summary for key, summary in table.items()}


def translate(key: Key, names: Mapping[Module, Module]) -> Key:
    """``key`` with its module under its other name, if it has one."""
    root, module, kind, name, call = key
    new_root, new_module = names.get((root, module), (root, module))
    return (new_root, new_module, kind, name, call)


def overridden(keys: Iterable[Key], rules: Iterable[tuple[str, str]]) -> dict[Module, Module]:
    """What ``OLD=NEW`` prefixes of FQNs say; a prefix ends at a dot or the name's end, and an empty one is the root."""
    names: dict[Module, Module] = {}
    for root, module, *_ in keys:
        for old, new in rules:
            if old in ("", module) or module.startswith(f"{old}."):
                rest = module if old == "" else module[len(old) :].lstrip(".")
                names[root, module] = (root, ".".join(part for part in (new, rest) if part))
                break
    return names


def _signatures(table: Mapping[Key, Summary] | Mapping[Key, Expected]) -> dict[Module, _Signature]:
    tensors: dict[Module, list[tuple[str, str, tuple[int, ...]]]] = {}
    classes: dict[Module, str] = {}
    for (root, module, kind, name, _), summary in table.items():
        # activations follow the batch, and rows of the optimizer come and go with sampling: weights say what it is
        shape = summary.shape if kind == "weight" else ()
        if kind in ("weight", "output"):
            tensors.setdefault((root, module), []).append((kind, name, shape))
            classes[root, module] = summary.module_class
    return {module: (classes[module], tuple(sorted(set(found)))) for module, found in tensors.items()}
