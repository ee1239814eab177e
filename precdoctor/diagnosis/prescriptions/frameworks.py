"""Edits of a script that make a change permanent, as snippets per framework; one test compiles them all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from precdoctor.diagnosis.claims import snippets
from precdoctor.runlog.changes import Change, Value

#: Framework -> lines to paste.
Edits = dict[str, str]

_IN_BFLOAT16: Edits = {
    "lightning": "from lightning.pytorch import Trainer\n\ntrainer = Trainer(precision='bf16-mixed')\n",
    "accelerate": "from accelerate import Accelerator\n\naccelerator = Accelerator(mixed_precision='bf16')\n",
    "transformers": (
        "from transformers import TrainingArguments\n\narguments = TrainingArguments(output_dir='out', bf16=True)\n"
    ),
}


def edits(changes: Sequence[Change], device: str) -> Edits:
    """Return ``{framework: lines to paste}`` for a set of changes made together; empty if no edit is known.

    ``device`` is ``cuda`` or ``cpu``.
    """
    settings = {c.setting: c.to for c in changes}
    if "scaler.init_scale" in settings or "scaler.growth_interval" in settings:
        return _scaler(settings, device)
    found: Edits = {}
    for change in changes:
        if (maker := _BY_SETTING.get(change.setting)) is not None:
            found |= maker(change, device)
    return found


def _scaler(settings: Mapping[str, Value], device: str) -> Edits:
    names = {"scaler.init_scale": "init_scale", "scaler.growth_interval": "growth_interval"}
    arguments = ", ".join(f"{name}={settings[key]!r}" for key, name in names.items() if key in settings)
    made = f"torch.amp.GradScaler({device!r}, {arguments})"
    return {
        "torch": f"import torch\n\nscaler = {made}  # once, before the loop\n",
        "lightning": (
            "import torch\n"
            "from lightning.pytorch import Trainer\n"
            "from lightning.pytorch.plugins import MixedPrecision\n\n"
            f"precision = MixedPrecision('16-mixed', {device!r}, scaler={made})\n"
            "trainer = Trainer(plugins=[precision])\n"
        ),
        "accelerate": (
            "from accelerate import Accelerator\n"
            "from accelerate.utils import GradScalerKwargs\n\n"
            f"accelerator = Accelerator(mixed_precision='fp16', kwargs_handlers=[GradScalerKwargs({arguments})])\n"
        ),
    }


def _bfloat16(_change: Change, device: str) -> Edits:
    return {"torch": snippets.bfloat16_autocast(device), **_IN_BFLOAT16}


def _module(change: Change, device: str) -> Edits:
    """Return the lines for plain torch only: with a framework, they go after the model is made."""
    return {"torch": snippets.run_in_float32(change.module, device)} if change.to == "float32" else {}


def _without_scaler(_change: Change, _device: str) -> Edits:
    return {
        "torch": "loss.backward()\noptimizer.step()  # no scaler.scale, scaler.step, scaler.update\n",
        **_IN_BFLOAT16,
    }


def _scale_floor(change: Change, _device: str) -> Edits:
    return {
        "torch": (
            "scaler.update()\n"
            f"if scaler.get_scale() < {change.to!r}:\n"
            f"    scaler.update(new_scale={change.to!r})\n"
        )
    }  # fmt: skip


def _eps(change: Change, _device: str) -> Edits:
    return {
        "torch": f"for group in optimizer.param_groups:\n    group['eps'] = {change.to!r}\n",
        "lightning": (
            "import torch\n\n"
            "def configure_optimizers(self):\n"
            f"    return torch.optim.AdamW(self.parameters(), eps={change.to!r})\n"
        ),
        "transformers": (
            "from transformers import TrainingArguments\n\n"
            f"arguments = TrainingArguments(output_dir='out', adam_epsilon={change.to!r})\n"
        ),
    }


def _master_weights(_change: Change, device: str) -> Edits:
    return {
        "torch": (
            "import torch\n\n"
            "for parameter in model.parameters():  # before the optimizer is made\n"
            "    if parameter.requires_grad:\n"
            "        parameter.data = parameter.data.float()\n"
            f"with torch.autocast({device!r}, dtype=torch.bfloat16):\n"
            "    loss = compute_loss(model, batch)\n"
        ),
        **_IN_BFLOAT16,
    }


_BY_SETTING: Mapping[str, Callable[[Change, str], Edits]] = {
    "module.dtype": _module,
    "autocast.dtype": _bfloat16,
    "scaler.enabled": _without_scaler,
    "scaler.min_scale": _scale_floor,
    "optimizer.eps": _eps,
    "optimizer.master_weights": _master_weights,
}
