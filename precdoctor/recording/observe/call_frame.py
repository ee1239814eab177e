"""A module call in progress: how it is recorded, and what the Python frames above reveal about its caller."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from precdoctor.recording.model import static
from precdoctor.recording.model.module_names import Place, Root
from precdoctor.recording.ops.dispatched_ops import is_compiled_graph

if TYPE_CHECKING:
    from precdoctor.recording.fp8.cast_scope import Call
    from precdoctor.recording.scene.root_call import RootCall


class CallMode:
    """How a root call and the calls below it are recorded."""

    __slots__ = ("delegated", "evaluating", "name", "phase")

    def __init__(self, phase: str, *, evaluating: bool, delegated: bool = False) -> None:
        self.phase = phase
        self.evaluating = evaluating
        #: Gradients are off only because the call runs in a custom autograd function, which computes them itself.
        self.delegated = delegated
        #: Calls are numbered per name: a pass over the validation set must not shift the numbers of training calls.
        self.name = "eval" if evaluating else phase


#: A call that is not recorded, and one that is only judged by its result: neither has rows.
NOT_RECORDED, EVALUATES = CallMode("", evaluating=False), CallMode("", evaluating=False)
_TRAINS = CallMode("train", evaluating=False)


@dataclass(slots=True, eq=False)
class Frame:
    """One module call in progress."""

    module: nn.Module
    place: Place | None
    mode: CallMode
    call: int = 0
    recorded: bool = False
    #: Sequence number of the first autograd node that the call can make.
    first_node: int = 0
    #: Of a top-level call in training: what a replay of the call needs.
    kept: RootCall | None = None
    #: A top-level call of a trained model without gradients: its result is judged.
    judged: bool = False
    #: The call began in the middle of loss code (a teacher, without gradients): that code continues after it.
    reopens: bool = False
    #: All calls around this one are wrappers (DistributedDataParallel and the like).
    outermost: bool = False
    #: The call as float8 casts record it; None until a cast was met.
    call_made: Call | None = None


#: Where a module keeps what it holds.
_HELD = ("_modules", "_parameters", "_buffers")
#: Attribute that ``nn.DataParallel`` sets on a replica of a module, made for one batch.
_REPLICA = "_is_replica"
#: Whether code is the forward of a custom autograd function; at most so many are remembered.
_FORWARDS: static.ByIdentity[CodeType, bool] = static.ByIdentity()
_MAX_CODES = 4096
_MAX_FRAMES, _MAX_WRAPPED = 40, 8
#: The module of pipeline stages; if it is not loaded, there are none to check for.
STAGES = "torch.distributed.pipelining.stage"
#: Where a pipeline stage computes shapes: the file, and the names that the function has had in torch.
_STAGE_FILE = f"{os.sep}torch{os.sep}distributed{os.sep}pipelining{os.sep}stage.py"
_SHAPE_RUNS = ("_forward_metadata_inference", "_shape_inference")


def inside_function() -> bool:
    """Return whether a custom autograd function (reentrant checkpointing, say) runs the module call in progress.

    Call this if gradients are off: the function then computes them itself. Searches up to the enclosing module call.
    """
    frame, calls = sys._getframe(1), 0
    for _ in range(_MAX_FRAMES):
        code = frame.f_code
        calls += code.co_name == "_call_impl"
        if _is_forward_of_function(code):
            return True
        if calls == 2 or frame.f_back is None:
            return False
        frame = frame.f_back
    return False


def _is_forward_of_function(code: CodeType) -> bool:
    """Return whether the code is the ``forward`` of a custom autograd function. From torch 2.14 on, C calls it."""
    known = _FORWARDS.get(code)
    if known is None:
        if len(_FORWARDS) >= _MAX_CODES:
            _FORWARDS.clear()
        known = _FORWARDS.put(code, any(code is own for own in _forward_codes(torch.autograd.Function)))
    return known


def _forward_codes(kind: type) -> Iterator[CodeType]:
    """Yield the code of ``forward`` of a class and its subclasses, and what its decorators wrap (``custom_fwd``)."""
    function: Any = static.members(kind).get("forward")
    function = function.__func__ if type(function) is staticmethod else function
    for _ in range(_MAX_WRAPPED):
        if type(function) is not FunctionType:
            break
        yield function.__code__
        function = static.own(function).get("__wrapped__")
    subclasses: list[type] = type.__subclasses__(kind)
    for derived in subclasses:
        yield from _forward_codes(derived)


def asks_for_shapes() -> bool:
    """Return whether a pipeline stage is run on uninitialised memory, only to get the shapes of its outputs."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        if frame is None:
            return False
        code = frame.f_code
        if code.co_name in _SHAPE_RUNS and code.co_filename.endswith(_STAGE_FILE):
            return True
        frame = frame.f_back
    return False


def inner_mode(above: CallMode) -> CallMode:
    """Return the mode of a call inside a call with mode ``above``; ``no_grad`` for a frozen encoder or a teacher."""
    if above.phase != "train" or above.delegated or torch.is_grad_enabled():
        return above
    delegated = inside_function()
    return CallMode("train" if delegated else "no_grad", evaluating=above.evaluating, delegated=delegated)


def root_mode(root: Root, module: nn.Module, recompute: bool) -> CallMode:
    """Return how a top-level call is recorded; :data:`EVALUATES` for one of a trained root without gradients."""
    if recompute:
        return CallMode("train", evaluating=False)
    grad = torch.is_grad_enabled()
    delegated = not grad and inside_function()
    grad = grad or delegated
    # A loss module has no parameters, and nobody calls its eval(): without gradients it serves an evaluation.
    evaluating = not static.is_training(module) or not (grad or root.parametric)
    if STAGES in sys.modules and asks_for_shapes():
        return NOT_RECORDED
    if evaluating and not grad and root.trained:
        return EVALUATES
    if grad and not (evaluating or delegated):
        return _TRAINS
    return CallMode("train" if grad else "no_grad", evaluating=evaluating, delegated=delegated)


def has_no_identity(module: nn.Module) -> bool:
    """Return whether a module only stands for another one: a compiled or empty graph, scripted module or replica."""
    # Runs on every call. A module's getattr runs Python code, and isinstance may ask its __class__.
    own = static.module_dict(module)
    if issubclass(type(module), torch.fx.GraphModule):
        return is_compiled_graph(module) or not any(dict.get(own, name) for name in _HELD)
    return issubclass(type(module), torch.jit.ScriptModule) or _REPLICA in own


def is_replica(module: nn.Module) -> bool:
    """Return whether ``nn.DataParallel`` made this module."""
    return _REPLICA in static.module_dict(module)
