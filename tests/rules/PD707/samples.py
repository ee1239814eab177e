"""Switches that ask for determinism, and layers they do not reach."""

from typing import Any

from tests.support.samples import Sample
from tests.support.training import FACTS, Training

STOCK = {
    "deterministic_algorithms": False,
    "deterministic_warn_only": False,
    "cublas_workspace_config": None,
    "cudnn_benchmark": False,
    "cudnn_deterministic": False,
}
GPU = {"type": "cuda", "name": "NVIDIA H100", "capability": [9, 0]}
UP, DOWN = "blocks.0.mlp.up", "blocks.0.mlp.down"


def network(up: str = "Conv2d", down: str = "Linear", device: Any = GPU, shape: Any = None, **flags: Any) -> Training:
    """A run in which two modules are of these classes; ``shape``: of the gradient of the first one's output."""
    run = Training(facts={**FACTS, "device": device, "flags": {**STOCK, **flags}})
    run.change(lambda r: r.update(module_class=up, **({"shape": shape} if shape else {})), module=UP)
    return run.change(lambda r: r.update(module_class=down), module=DOWN)


def nothing_asked() -> Training:
    """The stock settings, and a benchmark for speed."""
    return network(down="CTCLoss", cudnn_benchmark=True)


def everything_asked() -> Training:
    """Torch would have refused the other layer."""
    return network(down="CTCLoss", deterministic_algorithms=True, cublas_workspace_config=":4096:8")


def no_such_layers() -> Training:
    return network(up="Linear", cudnn_deterministic=True, cudnn_benchmark=True)


def global_pooling() -> Training:
    """Down to one element per channel: a mean."""
    return network(up="AdaptiveAvgPool2d", shape=[4, 64, 1, 1], cudnn_deterministic=True)


def older_log() -> Training:
    run = network()
    run.facts = {k: v for k, v in run.facts.items() if k != "flags"}
    return run


FIRING = {
    "warn_only": Sample(
        lambda: network(down="CTCLoss", deterministic_algorithms=True, deterministic_warn_only=True),
        module=DOWN, kind="grad_output", severity="warning", bare=True, rank=None, says=("1 layer", "warn_only"),
    ),
    "strict_but_by_timing": Sample(
        lambda: network(deterministic_algorithms=True, cudnn_benchmark=True),
        module=UP, severity="warning", bare=True, rank=None, says=("timing", "limit 1"),
    ),
    "cudnn_only": Sample(
        lambda: network(down="ReflectionPad2d", cudnn_deterministic=True),
        module=DOWN, severity="info", bare=True, rank=None,
        says=("`cudnn.deterministic`", "without `use_deterministic_algorithms`"),
    ),
    "pooled_to_seven": Sample(
        lambda: network(up="AdaptiveAvgPool2d", shape=[4, 64, 7, 7], cudnn_deterministic=True),
        module=UP, severity="info", bare=True, rank=None,
    ),
    "on_a_cpu": Sample(
        lambda: network(device={"type": "cpu"}, deterministic_algorithms=True, cudnn_benchmark=True),
        module=UP, severity="info", bare=True, rank=None, says=("on CUDA", "where the switches do nothing"),
    ),
}  # fmt: skip
HEALTHY = {f.__name__: f for f in (nothing_asked, everything_asked, no_such_layers, global_pooling, older_log)}
