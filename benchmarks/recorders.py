"""The recorders whose cost overhead.py measures: precdoctor's own, and what people use today.

Every one of them is there for the whole measurement, and on only for the steps inside its ``step()``.
"""

import contextlib
import json
import os
import tempfile
from pathlib import Path

import torch

CORE = ("output", "grad_output", "weight", "weight_grad")
#: Options of ours, by the name of the row.
OURS = {
    "every step, core": {"every": 1, "kinds": CORE},
    "every step, all": {"every": 1},
    "every 8th, core": {"every": 8, "kinds": CORE},
    "every 8th, all": {"every": 8},
    "budget 1%, all": {"budget": 0.01},
}
WHAT = {
    "every step, core": "26 statistics: outputs, gradients, weights, weight gradients",
    "every step, all": "... and given gradients, updates, inputs, buffers, loss",
    "every 8th, core": "as above",
    "every 8th, all": "as above",
    "budget 1%, all": "as above",
    "plain hook": "isnan, isinf, min, max, mean, std of outputs",
    "detect_anomaly": "NaN in each backward result; stores nothing",
    "DebugUnderflowOverflow": "absolute min and max of weights, inputs, outputs",
    "wandb.watch": "64-bin histograms of weights and weight gradients",
    "TensorBoard": "histograms of outputs, weights, weight gradients",
    "msprobe L0": "max, min, mean, L2 norm of module inputs, outputs, gradients, parameters",
    "nvdlfw-inspect": "min, max, mean, std, L1, L2 of outputs, gradients, weights, weight gradients",
}


def _holds_hooks(value):
    """Whether it is one of torch's tables of global module hooks, and not empty."""
    return isinstance(value, dict) and any(isinstance(key, int) for key in value)


class Ours:
    """precdoctor itself, in this process: off during plain steps."""

    def __init__(self, options):
        from precdoctor.recording.options import OPTIONS_VARIABLE, RUN_VARIABLE, RecordOptions
        from precdoctor.runlog.layout import create_run

        self._folder = tempfile.TemporaryDirectory()
        self.run = Path(self._folder.name) / "run"
        create_run(self.run, {"command": ["benchmark"]})
        os.environ[RUN_VARIABLE] = str(self.run)
        os.environ[OPTIONS_VARIABLE] = RecordOptions(**options).to_json()
        from precdoctor.recording import installation

        self.recorder = installation.install()
        self._state = "idle"
        self.recorder.state = "off"
        # Modules called in plain steps are to find no hooks at all: torch's way around them costs something, too.
        self._hooks = [(own, own.copy()) for own in vars(torch.nn.modules.module).values() if _holds_hooks(own)]
        self._put_hooks(there=False)

    def _put_hooks(self, *, there):
        for own, ours in self._hooks:
            own.clear()
            if there:
                own.update(ours)

    def attach(self, model, optimizer):
        """Its hooks are global."""

    @contextlib.contextmanager
    def step(self):
        self.recorder.state = self._state
        self._put_hooks(there=True)
        yield
        self._put_hooks(there=False)
        self._state, self.recorder.state = self.recorder.state, "off"

    def close(self):
        import precdoctor

        self.recorder.state = self._state
        self.recorder.close()
        run = precdoctor.open_run(self.run)
        rows, steps = len(run.tensors(columns=["step"])), run.steps()
        size = sum(f.stat().st_size for f in self.run.rglob("tensors-*.parquet"))
        sampled = max(1, int(steps["sampled"].sum()))
        return {"tensors": rows / sampled, "bytes": size / rows, "sampled": f"{sampled} of {len(steps)}"}


class Peer:
    """A recorder that sits on one model; its base does nothing."""

    def attach(self, model, optimizer):
        """Sit down on a model and its optimizer."""
        self.model, self.optimizer = model, optimizer
        self.begin()

    def begin(self):
        """Register what there is to register."""

    def step(self):
        """A context for one step."""
        return contextlib.nullcontext()

    def close(self):
        return {}


class PlainHook(Peer):
    def begin(self):
        def look(_module, _args, output):
            if isinstance(output, torch.Tensor):
                x = output.detach()
                numbers = x.isnan().any(), x.isinf().any(), x.min(), x.max(), x.mean(), x.std()
                self.seen = [number.item() for number in numbers]

        for module in self.model.modules():
            module.register_forward_hook(look)


class DetectAnomaly(Peer):
    def step(self):
        return torch.autograd.detect_anomaly(check_nan=True)


class UnderflowOverflow(Peer):
    def begin(self):
        from transformers.debug_utils import DebugUnderflowOverflow

        self.debug = DebugUnderflowOverflow(self.model)


class Wandb(Peer):
    def begin(self):
        import wandb

        self.folder = tempfile.TemporaryDirectory()
        self.run = wandb.init(mode="offline", dir=self.folder.name, project="overhead")
        self.run.watch(self.model, log="all", log_freq=1)

    @contextlib.contextmanager
    def step(self):
        yield
        self.run.log({"step": 1})


class TensorBoard(Peer):
    def begin(self):
        from torch.utils.tensorboard import SummaryWriter

        self.folder, self.count = tempfile.TemporaryDirectory(), 0
        self.writer = SummaryWriter(self.folder.name)

        def look(name):
            def hook(_module, _args, output):
                if isinstance(output, torch.Tensor):
                    self.writer.add_histogram(f"output/{name}", output.detach().float(), self.count)

            return hook

        for name, module in self.model.named_modules():
            module.register_forward_hook(look(name))
        self.optimizer.register_step_pre_hook(lambda *_: self.parameters())

    def parameters(self):
        for name, parameter in self.model.named_parameters():
            self.writer.add_histogram(f"weight/{name}", parameter.detach(), self.count)
            self.writer.add_histogram(f"grad/{name}", parameter.grad, self.count)
        self.count += 1


class Msprobe(Peer):
    def begin(self):
        from msprobe.pytorch import PrecisionDebugger

        self.folder = tempfile.TemporaryDirectory()
        config = Path(self.folder.name) / "config.json"
        statistics = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        dump = {"task": "statistics", "level": "L0", "dump_path": self.folder.name, "rank": [], "step": []}
        config.write_text(json.dumps({**dump, "async_dump": False, "statistics": statistics}))
        self.debugger = PrecisionDebugger(config_path=str(config))

    @contextlib.contextmanager
    def step(self):
        self.debugger.start(model=self.model)
        yield
        self.debugger.stop()
        self.debugger.step()


class NvdlfwInspect(Peer):
    """Its tensors are handed to it by TransformerEngine's layers; here by hooks on every module."""

    def begin(self):
        import nvdlfw_inspect.api as inspect

        self.folder = tempfile.TemporaryDirectory()
        wanted = ["min", "max", "mean", "std", "l1_norm", "l2_norm"]
        tensors = [
            {"tensor": t, "stats": wanted, "freq": 1} for t in ("output", "grad_output", "weight", "weight_grad")
        ]
        feature = {"enabled": True, "tensors_struct": tensors}
        config = {"all": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "LogTensorStats": feature}}
        inspect.initialize(config_file=config, log_dir=self.folder.name, default_logging_enabled=True)
        inspect.infer_and_assign_layer_names(self.model)
        self.inspect = inspect
        for module in self.model.modules():
            module.register_forward_hook(lambda m, _, output: self.log(m.name, "output", output))
            module.register_full_backward_hook(lambda m, _, given: self.log(m.name, "grad_output", given[0]))
        self.optimizer.register_step_pre_hook(lambda *_: self.parameters())

    def log(self, name, tensor_name, tensor):
        if isinstance(tensor, torch.Tensor):
            self.inspect.log_tensor_stats(name, tensor_name=tensor_name, tensor=tensor.detach(), skip_reduction=True)

    def parameters(self):
        for name, parameter in self.model.named_parameters():
            self.log(name, "weight", parameter)
            self.log(name, "weight_grad", parameter.grad)

    @contextlib.contextmanager
    def step(self):
        yield
        self.inspect.step()


PEERS = {
    "plain hook": (PlainHook, "torch"),
    "detect_anomaly": (DetectAnomaly, "torch"),
    "DebugUnderflowOverflow": (UnderflowOverflow, "transformers"),
    "wandb.watch": (Wandb, "wandb"),
    "TensorBoard": (TensorBoard, "tensorboard"),
    "msprobe L0": (Msprobe, "msprobe"),
    "nvdlfw-inspect": (NvdlfwInspect, "nvdlfw_inspect"),
}
