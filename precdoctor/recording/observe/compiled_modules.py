"""Rows from inside compiled graphs (``--compiled instrument``): Dynamo traces a probe op in after every module.

The compiler must neither remove nor move a probe, so the op is registered with an effect. Its argument has to exist as
a tensor: operations around it are not fused, so they round one by one. That changes training, so it is optional.
"""

from __future__ import annotations

import collections
import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn

from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import unwrap
from precdoctor.recording.ops.dispatched_ops import take_gradients
from precdoctor.recording.process import attach
from precdoctor.recording.recorder import MAX_CALLS, Recorder
from precdoctor.recording.recorder.hook_guard import guarded

CHANGES_ROUNDING = (
    "--compiled instrument puts a statistics op behind every module inside compiled graphs: less is fused there, so "
    "losses and weights differ by rounding from those of a run without it"
)
#: Flags of a probe: its tensor takes part in a backward pass; its module is in evaluation mode; its tensor is the
#: gradient of the output.
TRAINS, EVALUATES, GRADIENT = 1, 2, 4
#: The site number that the feature test uses.
_TRIAL = -1

_library = torch.library.Library("precdoctor", "FRAGMENT")
_library.define("probe(Tensor x, int number, str name, int what) -> ()")
_receivers: list[Callable[[Tensor, int, str, int], None]] = []


def _probe(x: Tensor, number: int, name: str, what: int) -> None:
    """The op on a tensor: hand it to the receivers. It returns and changes nothing."""
    for receive in _receivers:
        receive(x, number, name, what)


_library.impl("probe", _probe, "CompositeExplicitAutograd")
torch.library.register_fake("precdoctor::probe", lambda *_: None, lib=_library)


class Probes:
    """Numbers the modules of compiled models before they are traced, and makes rows of the tensors their graphs hand
    over.

    Modules are identified by ``id``; nothing is stored on them. A module first met while it is traced (if a compiled
    function is the first to call its model) has no probe. A parent that returns its child's tensor gets a row as well:
    compilers reuse memory, and tensor objects, for other values.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._numbers: dict[int, int] = {}
        #: Modules by number. Graphs keep the numbers of their probes for good; places are looked up in the current run.
        self._modules: list[weakref.ref[nn.Module]] = []
        self._numbered_roots: dict[int, weakref.ref[nn.Module]] = {}
        self._micro_step = (-1, -1)
        self._calls: collections.Counter[tuple[int, str, str]] = collections.Counter()
        self._meet = guarded(recorder)(self._number_all)

    def install(self) -> None:
        """Receive the probes' tensors; number modules before ``nn.Module.compile`` traces them: no hook precedes it."""
        _receivers[:] = [guarded(self._recorder)(self._receive)]
        original, meet = nn.Module.compile, self._meet

        @functools.wraps(original)
        def compile_in_place(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            meet(module, in_place=True)
            return original(module, *args, **kwargs)

        nn.Module.compile = compile_in_place  # type: ignore[method-assign,assignment]  # __wrapped__ is kept

    # --- before and while tracing ------------------------------------------------------------------------------------

    def meet(self, root: nn.Module) -> None:
        """Number the modules of a top-level module as it is called, if anything in it is compiled."""
        known = self._numbered_roots.get(id(root))
        if known is None or known() is not root:
            self._numbered_roots[id(root)] = weakref.ref(root)
            self._meet(root)

    def _number_all(self, root: nn.Module, *, in_place: bool = False) -> None:
        """Number the modules of a model that is compiled, or has compiled parts."""
        modules = static.modules(root)
        wrapped = {id(unwrap(m)) for m in modules if type(m).__name__ == "OptimizedModule"}
        in_its_place = any(static.module_dict(m).get("_compiled_call_impl") is not None for m in modules)
        compiled = in_place or in_its_place or bool(wrapped)
        if not compiled or not _supported():
            return
        for module in modules:
            if id(module) not in wrapped:  # else the wrapper's call has the row
                self._numbers[id(module)] = len(self._modules)
                self._modules.append(weakref.ref(module))

    def traced(self, module: nn.Module, result: Any) -> None:
        """Put probes on a module's outputs. Dynamo traces this as part of the forward hook."""
        number = self._numbers.get(id(module))
        if number is None:
            return
        if isinstance(result, Tensor):
            _place_probe(module, result, number, "")
        elif isinstance(result, (tuple, list, dict)):
            for name, x in result.items() if isinstance(result, dict) else enumerate(result):
                if isinstance(x, Tensor):
                    _place_probe(module, x, number, str(name))

    # --- while the graph runs ----------------------------------------------------------------------------------------

    def _receive(self, x: Tensor | None, number: int, name: str, what: int) -> None:
        """Make a row of the tensor that a probe was given; None is the gradient of an output that nobody used."""
        recorder = self._recorder
        if recorder.state == "idle":
            recorder.arm()
        if x is None or number < 0 or not recorder.live or recorder.state != "armed":
            return  # nobody used the output, or it is the feature test
        module = self._modules[number]()
        place = None if module is None else recorder.names.place(module, None)
        if place is None or place.is_wrapper or not recorder.wants(place):
            return
        gradient = bool(what & GRADIENT)
        if gradient and not recorder.in_backward:
            return  # a backward pass of the compiler, or one that makes no step
        if (dense := tensor_leaves.plain(x)) is None:
            return
        phase, evaluating = self._mode(what)
        if phase is None:
            return
        call = self._call(number, name, "" if gradient else "eval" if evaluating else phase)
        kind = "grad_output" if gradient else "output"
        recorder.measure(place, kind, name, x, dense, call=call, phase=phase, evaluating=evaluating)
        if gradient:
            recorder.names.roots[place.root].trained = True

    def _mode(self, what: int) -> tuple[str | None, bool]:
        """Return phase and evaluation mode of the call in progress, else those at tracing; phase None: no row."""
        if what & GRADIENT:
            return "train", False
        stack = getattr(self._recorder.local, "stack", ())
        modes = [frame.mode for frame in stack if not isinstance(frame.module, torch.fx.GraphModule)]
        if modes:
            mode = modes[-1]
            return (mode.phase, mode.evaluating) if mode.phase in ("train", "no_grad") else (None, False)
        return "train" if what & TRAINS else "no_grad", bool(what & EVALUATES)

    def _call(self, number: int, name: str, mode: str) -> int:
        """Return the number of the call that made this output, from 0 in each micro-step and mode.

        Gradients have no mode (""): they arrive in the reverse order of the calls.
        """
        now = (self._recorder.step, self._recorder.micro_step)
        if now != self._micro_step:
            self._calls.clear()
            self._micro_step = now
        before = self._calls[number, name, mode]
        self._calls[number, name, mode] += 1
        if not mode:
            before = max(self._calls[number, name, "train"] - 1 - before, 0)
        return min(before, MAX_CALLS - 1)


def _place_probe(module: nn.Module, x: Tensor, number: int, name: str) -> None:
    """Trace a probe in after a module's output, and one on the gradient of that output."""
    if not x.is_floating_point():
        return
    what = (TRAINS if x.requires_grad else 0) | (0 if static.is_training(module) else EVALUATES)
    torch.ops.precdoctor.probe(x, number, name, what)
    if x.requires_grad:

        def gradient(grad: Tensor) -> None:
            torch.ops.precdoctor.probe(grad, number, name, GRADIENT)

        x.register_hook(gradient)


@functools.cache
def _supported() -> bool:
    """Test whether this torch traces probes and keeps them, forward and backward; print a sentence if not."""
    received: list[int] = []
    module = nn.Identity()

    def listen(_x: Tensor, number: int, _name: str, what: int) -> None:
        if number == _TRIAL:
            received.append(what)

    def trial(x: Tensor) -> Tensor:
        y = x.exp()
        _place_probe(module, y, _TRIAL, "")
        return y.sin()

    _receivers.append(listen)
    try:
        library: Any = torch.library
        library._register_effectful_op("precdoctor::probe", library.EffectType.ORDERED)
        with warnings.catch_warnings(), torch.enable_grad():
            warnings.simplefilter("ignore")
            x = torch.ones(2, requires_grad=True)
            (gradient,) = take_gradients(torch.compile(trial, fullgraph=True, backend="aot_eager")(x).sum(), x)
        why = None if received == [TRAINS, GRADIENT] and gradient is not None else "the compiler drops the probes"
    except Exception as error:  # noqa: BLE001 - the private name may be gone, and the compiler may fail
        attach.let_through(error)
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
    finally:
        _receivers.remove(listen)
    if why is not None:
        attach.say(f"compiled graphs of torch {torch.__version__} cannot be instrumented ({why}); recording boundaries")
    return why is None
