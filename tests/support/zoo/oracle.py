"""What a step really held, taken by a script itself with plain torch: per-module hooks, copies, and numpy files.

The tests recompute every statistic from these arrays. Values are kept as float64, which holds those of every narrower
type exactly; the type goes beside them.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


class Oracle:
    """Copies of the outputs, gradients, weights and updates of one step.

    Keys are ``kind|module|name``; values of several calls or micro-steps lie one after the other.
    """

    def __init__(self, model: nn.Module, step: int) -> None:
        self.step = step
        self.now = 0
        self._model = model
        self._owner = {}
        for fqn, module in model.named_modules():
            for own, parameter in module.named_parameters(recurse=False):
                self._owner.setdefault(parameter, (fqn, own))
        self._values: dict[str, list[Tensor]] = defaultdict(list)
        self._seen: list[Tensor] = []
        for fqn, module in model.named_modules():
            module.register_forward_hook(self._output_hook(fqn))

    def _output_hook(self, fqn: str):
        def hook(module: nn.Module, args: object, output: object) -> None:
            if self.now != self.step or not isinstance(output, Tensor):
                return
            if any(output is seen and output._version == version for seen, version in self._seen):
                return  # a parent that returns its child's tensor
            self._seen.append((output, output._version))
            self._values[f"output|{fqn}|"].append(output.detach().clone())
            if output.requires_grad:
                output.register_hook(lambda g: self._values[f"grad_output|{fqn}|"].append(g.clone()))

        return hook

    def _each(self, kind: str, values: dict[nn.Parameter, Tensor]) -> None:
        for parameter, value in values.items():
            fqn, own = self._owner[parameter]
            self._values[f"{kind}|{fqn}|{own}"] = [value.detach().clone()]

    def accumulated(self) -> None:
        """To be called after the last backward: gradients as accumulated."""
        if self.now == self.step:
            self._each("weight_grad", {p: p.grad for p in self._owner if p.grad is not None})

    def about_to_step(self) -> None:
        """To be called just before ``optimizer.step()``: weights and the gradients it is given."""
        if self.now == self.step:
            self._each("weight", {p: p for p in self._owner if p.requires_grad})
            self._each("weight_grad_step", {p: p.grad for p in self._owner if p.grad is not None})
            self._before = {p: p.detach().clone() for p in self._owner if p.grad is not None}

    def stepped(self) -> None:
        """To be called just after it."""
        if self.now == self.step:
            for p, before in self._before.items():
                fqn, own = self._owner[p]
                self._values[f"before|{fqn}|{own}"] = [before]
                self._values[f"after|{fqn}|{own}"] = [p.detach().clone()]
            self._save()
        self.now += 1

    def _save(self) -> None:
        directory = os.environ.get("ZOO_ORACLE")
        if directory is None:
            return
        name = type(self._model).__name__
        arrays = {
            key: np.concatenate([v.to(torch.float64).numpy().reshape(-1) for v in values])
            for key, values in self._values.items()
        }
        types = {key: str(values[0].dtype).removeprefix("torch.") for key, values in self._values.items()}
        np.savez(Path(directory) / f"{name}.npz", **arrays)
        (Path(directory) / f"{name}.json").write_text(json.dumps({"step": self.step, "types": types}))
