"""Torch's switches that change the numerics of a run, for rank.json."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from precdoctor.recording.process import attach


def flags() -> dict[str, Any]:
    """Every switch this torch has; null where it cannot be read.

    Torch has two spellings for TF32 (``allow_tf32`` and ``fp32_precision``) and refuses to read the older one after
    the newer one was set.
    """
    return {name: value for name, read in _readers().items() if (value := _read(read)) is not _ABSENT}


_ABSENT = object()


def _read(read: Callable[[], Any]) -> Any:
    try:
        value = read()
    except AttributeError:
        return _ABSENT
    except RuntimeError as error:
        attach.let_through(error)
        return None
    return value if isinstance(value, (bool, int, float, str)) or value is None else str(value)


def _readers() -> Mapping[str, Callable[[], Any]]:
    backends: Any = torch.backends
    matmul = backends.cuda.matmul
    return {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "cublas_workspace_config": lambda: os.environ.get("CUBLAS_WORKSPACE_CONFIG"),
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "cudnn_allow_tf32": lambda: backends.cudnn.allow_tf32,
        "cudnn_benchmark": lambda: backends.cudnn.benchmark,
        "cudnn_deterministic": lambda: backends.cudnn.deterministic,
        "num_threads": torch.get_num_threads,
        "python_flags_optimize": lambda: sys.flags.optimize,
        "matmul_allow_tf32": lambda: matmul.allow_tf32,
        "matmul_allow_fp16_reduced_precision_reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "matmul_allow_bf16_reduced_precision_reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "matmul_allow_fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
        # the spelling of torch 2.9 and later
        "matmul_fp32_precision": lambda: matmul.fp32_precision,
        "cudnn_conv_fp32_precision": lambda: backends.cudnn.conv.fp32_precision,
        "mkldnn_matmul_fp32_precision": lambda: backends.mkldnn.matmul.fp32_precision,
    }
