"""The changes that ``record --apply`` can make to a training, as prescription files, run.json and events name them.

One change sets one setting. This table of settings and their values is shared by the diagnosis, which prescribes
changes, and the recorder, which makes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from precdoctor.errors import UsageError, did_you_mean
from precdoctor.numerics.narrow_cast import parse_casts

#: A setting's value.
Value = bool | int | float | str


@dataclass(frozen=True)
class Setting:
    """A setting that a change can set.

    Attributes:
        name: its name in files and events.
        takes: the values it takes, in words, for messages.
        check: returns whether a value is valid.
        doc: the effect, one sentence.
        of_module: whether it is set on one named module.
        warns: it cannot be set from outside the script, so the recorder only watches and warns.
    """

    name: str
    takes: str
    check: Callable[[Any], bool]
    doc: str
    of_module: bool = False
    warns: bool = False


def _positive(value: Any) -> bool:
    """Return whether ``value`` is above 0 and not above the largest FP64 number; False for a bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _switch(value: Any) -> bool:
    return isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _one_of(*names: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


def _casts(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(parse_casts(value))
    except UsageError:
        return False


SETTINGS: Mapping[str, Setting] = {
    s.name: s
    for s in (
        Setting(
            "module.dtype",
            '"float32" or "bfloat16"',
            _one_of("float32", "bfloat16"),
            "Runs one module, or with a root alone the whole model, in this format: autocast off (or in BF16), its "
            "inputs cast, its FP16 weights widened.",
            of_module=True,
        ),
        Setting(
            "module.casts",
            'casts by operand, such as "weight E4M3FN tensor, grad_output E5M2 tensor"',
            _casts,
            "Casts one module's weights, inputs and output gradients to these formats and back; straight through.",
            of_module=True,
        ),
        Setting(
            "autocast.dtype", '"bfloat16"', _one_of("bfloat16"), "Autocast regions that ask for float16 get bfloat16."
        ),
        Setting(
            "scaler.init_scale",
            "a number above 0",
            _positive,
            "Every GradScaler the script makes starts at this scale.",
        ),
        Setting(
            "scaler.growth_interval",
            "a number of steps from 1",
            _count,
            "Every GradScaler the script makes waits this many clean steps before it grows.",
        ),
        Setting(
            "scaler.min_scale",
            "a number above 0",
            _positive,
            "No GradScaler backs off below this scale; torch has no floor.",
        ),
        Setting("scaler.enabled", "false", lambda value: value is False, "GradScalers are made with enabled=False."),
        Setting("optimizer.eps", "a number above 0", _positive, "The eps of every parameter group that has one."),
        Setting(
            "optimizer.master_weights",
            '"float32"',
            _one_of("float32"),
            "The optimizer updates FP32 copies of 16-bit weights, which are rounded from them after each step.",
        ),
        Setting("optimizer.clip_order", '"unscale-first"', _one_of("unscale-first"), "Warns only.", warns=True),
        Setting(
            "flag.float32_matmul_precision",
            '"highest", "high" or "medium"',
            _one_of("highest", "high", "medium"),
            "torch.set_float32_matmul_precision.",
        ),
        Setting("flag.cudnn_allow_tf32", "true or false", _switch, "torch.backends.cudnn.allow_tf32."),
        *(
            Setting(f"flag.matmul_{name}", "true or false", _switch, f"torch.backends.cuda.matmul.{name}.")
            for name in (
                "allow_tf32",
                "allow_fp16_reduced_precision_reduction",
                "allow_bf16_reduced_precision_reduction",
            )
        ),
    )
}


@dataclass(frozen=True)
class Change:
    """One setting and its new value.

    Attributes:
        setting: a key of :data:`SETTINGS`.
        to: the new value.
        before: the old value, in the diagnosed run; None if its log does not have it.
        root: for a module's setting, the root's class + ``#n``; "" means any root.
        module: FQN below the root; "" for settings of no module, and for the root itself, which ``root`` then names.
    """

    setting: str
    to: Value
    before: Value | None = None
    root: str = ""
    module: str = ""

    @property
    def where(self) -> str:
        """The module, or the first word of the setting (``scaler``, ``optimizer``), for messages."""
        return f"`{self.module or self.root}`" if self.of_module else self.setting.partition(".")[0]

    @property
    def of_module(self) -> bool:
        """Whether the change is of one module (or root)."""
        return bool(self.module or self.root)

    def as_dict(self) -> dict[str, Any]:
        """The change as files and events hold it; absent values are left out."""
        place = {"root": self.root, "module": self.module} if self.of_module else {}
        before = {} if self.before is None else {"from": self.before}
        return {"setting": self.setting, **place, **before, "to": self.to}

    @classmethod
    def of(cls, raw: Any, origin: str) -> Change:
        """Parse and check a change; the inverse of :meth:`as_dict`. ``origin`` is its place in the file, for messages.

        Raises:
            UsageError: an unknown setting or key, or a value the setting cannot take.
        """
        if not isinstance(raw, Mapping):
            raise UsageError(f"{origin}: a change is a table with setting and to, got {raw!r}")
        unknown = next((key for key in raw if key not in ("setting", "root", "module", "from", "to")), None)
        if unknown is not None:
            raise UsageError(f"{origin}: a change has setting, root, module, from and to, not {unknown!r}")
        setting = SETTINGS.get(raw["setting"]) if isinstance(raw.get("setting"), str) else None
        if setting is None:
            raise UsageError(f"{origin}: no setting {raw.get('setting')!r}{_nearest(raw.get('setting'))}")
        if "to" not in raw or not setting.check(raw["to"]):
            given = repr(raw["to"]) if "to" in raw else "nothing"
            raise UsageError(f"{origin}: {setting.name} takes {setting.takes}, got {given}")
        root, module = raw.get("root", ""), raw.get("module", "")
        if not isinstance(root, str) or not isinstance(module, str) or bool(module or root) != setting.of_module:
            needs = "needs the name of a module, or of a root" if setting.of_module else "is of no module"
            raise UsageError(f"{origin}: {setting.name} {needs}, got module = {module!r}, root = {root!r}")
        return cls(setting.name, raw["to"], raw.get("from"), root, module)


def _nearest(name: object) -> str:
    return did_you_mean(str(name), SETTINGS) or f"; known: {', '.join(SETTINGS)}"
