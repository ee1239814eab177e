"""Records what softmaxes read: softmax, log_softmax, cross_entropy and scaled_dot_product_attention, on sampled steps.

A dispatch mode is open while a top-level module runs, and then until ``backward`` begins, because the loss is computed
there. The mode runs every op unchanged and reads the arguments of these functions. Between samples there is no mode.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from precdoctor.recording import kernels
from precdoctor.recording.deepscan.window import unfit
from precdoctor.recording.fp8.fp8_mode import CastMode
from precdoctor.recording.model import static, tensor_leaves
from precdoctor.recording.model.module_names import Place
from precdoctor.recording.observe.kv_caches import KvCaches
from precdoctor.recording.ops.dispatched_ops import (
    Retiring,
    differentiates_forward,
    is_derived_otherwise,
    is_own_run,
    left_to_others,
    put_on,
    retire,
    something_is_compiled,
    take_off,
)
from precdoctor.recording.recorder import MAX_CALLS, Recorder
from precdoctor.recording.recorder.hook_guard import guarded
from precdoctor.recording.slots.deferred import deferred, is_capturing
from precdoctor.recording.slots.logit_sample import Sampled, Sharpness, of_attention, of_scores, sharpness

if TYPE_CHECKING:
    from collections.abc import Callable

    from precdoctor.recording.observe.call_frame import Frame
    from precdoctor.recording.slots.slot_table import Entry

#: Most rows per step. After _PATIENCE sampled calls without logits, the mode opens on every _NOW_AND_THEN-th call only.
_MAX_ROWS, _PATIENCE, _NOW_AND_THEN = 512, 4, 16
#: Attributes in which modules keep their number of heads.
_HEADS: Final = ("num_heads", "n_heads", "n_head", "nhead", "num_attention_heads", "heads")
_OUTSIDE: Final = Place("", "", "")


class LogitMode(Retiring):
    """Runs each op unchanged and passes the ops of :data:`_GROUPS` on to its owner."""

    supports_higher_order_operators = True
    watches = True
    ignores_ours = True

    def __init__(self, look: Callable[..., None]) -> None:
        super().__init__()
        self._look = look

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: else torch loads its compiler (a second) to skip this mode, and nothing compiles under it."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code runs compiled, and the mode does not see inside."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if types and any(map(tensor_leaves.computes_itself, types)):
            return left_to_others(func, types, args, kwargs)
        known = _op_kinds.get(id(func)) or _classify(func)
        result = func(*args, **kwargs)
        if known[0] == "derived otherwise":
            self.changes_gradients = True
        elif known[0] is not None and not self.over:
            caller = sys._getframe().f_back  # None in autograd's thread for a device
            self._look(known, args, kwargs, result, caller.f_code.co_name if caller is not None else "")
        return result


#: The group of an op, its name and those of its arguments, and the op itself, which keeps its id unique.
_OpKind = tuple[str | None, tuple[str, ...], Any]
_op_kinds: dict[int, _OpKind] = {}
_GROUPS: Final = {
    "softmax": ("_softmax", "_log_softmax", "_safe_softmax", "softmax", "log_softmax"),
    "attention": (
        "scaled_dot_product_attention",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    ),
    # Ops that pass values on under another address, and ops that reveal the purpose of a softmax.
    "passes": ("_to_copy", "clone", "native_dropout", "dropout", "mul"),
    "chooses": ("topk", "max"),
    "product": ("bmm", "baddbmm", "matmul"),
    "sums": ("sum",),
    "loss": ("nll_loss_forward", "nll_loss2d_forward", "nll_loss", "nll_loss_nd"),
}


def _classify(func: Any) -> _OpKind:
    schema, what = getattr(func, "_schema", None), None
    names: tuple[str, ...] = ()
    if schema is not None and schema.name.startswith("aten::"):
        name = schema.name.removeprefix("aten::")
        what = next((group for group, ops in _GROUPS.items() if name in ops), None)
        if what == "passes" and schema.is_mutable:
            what = None
        what = "derived otherwise" if is_derived_otherwise(func) else what
        names = (name, *(a.name for a in schema.arguments))
    found = _op_kinds[id(func)] = what, names, func
    return found


class Logits:
    """Opens and closes the mode in the recorded thread, and makes rows of the logits. One per recorder."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        #: In inference runs, records what attention reads.
        self.caches = KvCaches(recorder)
        #: The open mode, which :meth:`close` closes.
        self.mode: LogitMode | None = None
        self._thread = 0
        #: The top-level call that the mode is open for; None after it, in loss code.
        self._root_call: object | None = None
        self._look = guarded(recorder)(self._handle_op)
        self._empty_samples: dict[str, int] = {}
        self._root = ""
        self._rows = 0
        self._when = (-1, -1)
        self._numbers: dict[tuple[object, ...], int] = {}
        #: By id of a storage: the row of the softmax whose result it holds; None for a result of ``topk``. A weak
        #: reference to the storage keeps its id from being used again.
        self._softmax_results: dict[int, tuple[StorageWeakRef, Entry | None]] = {}
        recorder.when_forked.append(self._reset)
        recorder.when_closing.append(self.close)
        recorder.when_turned_off.append(self.close)

    def _reset(self) -> None:
        """In a forked child, leave the parent's mode and forget its run."""
        if self.mode is not None:
            self.mode.over = True
            if self._thread == threading.get_ident():
                take_off(self.mode)
        self.mode = self._root_call = None
        self._empty_samples.clear()
        self._softmax_results.clear()
        self._numbers.clear()

    # --- opening and closing the mode --------------------------------------------------------------------------------

    def root_begins(self, frame: Frame) -> None:
        """Open the mode as a top-level call of a sampled step begins, outside of backward passes."""
        self.close()
        place = frame.place
        wanted = self._recorder.options.takes("logits") or self.caches.takes()
        inference = self._recorder.claim.forwards_are_steps
        is_wrapper = place is not None and place.is_wrapper and frame.mode.phase != ""  # the model inside has the rows
        recorded = frame.recorded or (is_wrapper and unfit(frame.module) is None)
        if place is None or not recorded or not wanted or not _may_open(inference=inference):
            return
        self._renumber()
        vain = self._empty_samples.get(place.root, 0)
        self._empty_samples[place.root] = vain + 1
        if vain >= _PATIENCE and vain % _NOW_AND_THEN:
            return
        self._root, self._root_call = place.root, frame
        self._open()

    def root_ended(self, frame: Frame, *, loss_follows: bool) -> None:
        """Note that the call has returned or raised; from now on the mode sees loss code, if any."""
        if self.mode is None or self._root_call is not frame:
            return
        self._root_call = None
        if not loss_follows:
            self.close()

    def _open(self) -> None:
        self.mode = LogitMode(self._look)
        self._thread = threading.get_ident()
        put_on(self.mode)

    def close(self) -> None:
        """Close the mode, as a backward pass, another top-level call or another step begins. Safe if none is open."""
        mode, self.mode, self._root_call = self.mode, None, None
        if mode is None:
            return
        self._softmax_results.clear()
        mode.over = True
        if self._thread == threading.get_ident():
            retire(mode)

    def _renumber(self) -> None:
        """Restart the numbering of rows when the micro-step has changed."""
        now = (self._recorder.step, self._recorder.micro_step)
        if now != self._when:
            self._rows = self._rows if now[0] == self._when[0] else 0
            self._when = now
            self._numbers.clear()

    # --- from an op to a row -----------------------------------------------------------------------------------------

    def _handle_op(self, known: _OpKind, args: Any, kwargs: Any, result: Any, caller: str) -> None:
        """Handle an op of one of the groups after it has run; ``caller`` is the function that called it."""
        what, names, _ = known
        if not self._recorder.live or torch._C._functorch.maybe_current_level() is not None:
            return
        if torch._C._get_tracing_state() is not None or is_capturing() or torch._C._current_graph_task_id() != -1:
            return
        given = dict(zip(names[1:], args, strict=False)) | kwargs
        if what == "softmax":
            self._softmax(names[0], given, result, caller)
        elif what == "attention":
            self._attention(given)
        elif self._softmax_results:
            self._note_use(what, given, result)
        if what == "chooses" and names[0] == "topk":
            self._note(result[0] if isinstance(result, (tuple, list)) else result, None)

    def _note_use(self, what: str | None, given: dict[str, Any], result: Any) -> None:
        """Note the role of a softmax from an op on its result, or that the result lives on in another tensor."""
        for x in given.values():
            entry = self._remembered(x)[1]
            if entry is None or entry.sharpness is None:
                continue
            if what == "passes":
                self._note(result[0] if isinstance(result, (tuple, list)) else result, entry)
            elif not entry.sharpness.role:
                role = {"product": "attention", "sums": "attention", "chooses": "router", "loss": "output"}[str(what)]
                # A weighted sum of vectors has one dimension more than its weights; a product with one query also.
                wide = {"product": max(len(entry.shape), x.dim()) > 2, "sums": x.dim() > len(entry.shape)}
                entry.sharpness.role = role if wide.get(str(what), True) else ""
            return

    def _note(self, x: Any, entry: Entry | None) -> None:
        """Remember that a tensor's storage holds the result of a softmax (its row) or of topk (None)."""
        if isinstance(x, Tensor) and x.is_floating_point() and x.layout is torch.strided:
            storage = x.untyped_storage()
            self._softmax_results[int(storage._cdata)] = StorageWeakRef(storage), entry

    def _remembered(self, x: Any) -> tuple[bool, Entry | None]:
        """Return whether a tensor's storage is remembered, and with which row."""
        if not isinstance(x, Tensor) or not self._softmax_results or x.layout is not torch.strided:
            return False, None
        found = self._softmax_results.get(int(x.untyped_storage()._cdata))
        return (False, None) if found is None else (True, found[1])

    def _softmax(self, op: str, given: dict[str, Any], result: Any, caller: str) -> None:
        x, dim = given.get("self", given.get("input")), given.get("dim")
        if not isinstance(x, Tensor) or type(dim) is not int:
            return
        chosen = self._remembered(x) == (True, None)
        name = "sdpa" if op == "_safe_softmax" else "cross_entropy" if caller == "cross_entropy" else op.lstrip("_")
        role = "router" if chosen else ""
        role = {"sdpa": "attention", "cross_entropy": "output"}.get(name, role)
        frame = self._frame()
        heads = _heads_of(frame) if x.dim() == 3 else 0
        entry = self._record(frame, name, x, lambda: of_scores(x, dim, heads), role)
        if entry is not None and caller != "gumbel_softmax":
            self._note(result, entry)

    def _attention(self, given: dict[str, Any]) -> None:
        """Record the logits of fused attention, computed from its arguments, and in inference its keys and values."""
        query, key = given.get("query"), given.get("key")
        if not isinstance(query, Tensor) or not isinstance(key, Tensor) or tensor_leaves.plain(key) is None:
            return
        causal, scale = given.get("is_causal") is True, given.get("scale")
        if self.caches.takes():
            self.caches.attention_reads(self._frame(), query, key, given.get("value"), causal=causal)
        mask = given.get("attn_mask", given.get("attn_bias"))
        self._record(
            self._frame(),
            "sdpa",
            query,
            lambda: of_attention(query, key, mask, causal=causal, scale=scale if type(scale) is float else None),
            "attention",
        )

    def _frame(self) -> Frame | None:
        stack: list[Frame] = getattr(self._recorder.local, "stack", None) or []
        return stack[-1] if stack else None

    def _record(
        self, frame: Frame | None, name: str, x: Tensor, sample: Callable[[], Sampled | None], role: str
    ) -> Entry | None:
        """Make the row under the innermost module call; return None if no row is made.

        Args:
            frame: that call; None in loss code.
            name: the function that reads the logits.
            x: a tensor with the shape and dtype to record.
            sample: computes the logits.
            role: ``attention``, ``router``, ``output``, or "" if not known yet.
        """
        recorder = self._recorder
        if (frame is not None and (not frame.recorded or frame.place is None)) or not recorder.options.takes("logits"):
            return None
        self._empty_samples[self._root] = 0
        place, call, phase, evaluating = _OUTSIDE, 0, "train", False
        if frame is not None and frame.place is not None:
            place, call, phase, evaluating = frame.place, frame.call, frame.mode.phase, frame.mode.evaluating
        key = (place, call, phase, evaluating, name)
        number = self._numbers.get(key, 0)
        if tensor_leaves.plain(x) is None or self._rows >= _MAX_ROWS or number >= MAX_CALLS:
            return None
        self._rows, self._numbers[key] = self._rows + 1, number + 1
        with kernels.apart_from_user_modes(), _without_autocast(x):
            try:
                found = sample()
                if found is None:
                    return None
                numbers, heads = sharpness(found), max(1, found.heads)
                values = found.values.masked_fill(found.values == -torch.inf, 0.0)
            except torch.OutOfMemoryError:
                return None
            called = f"{name}.{number}" if number else name
            entry = recorder.measure(place, "logits", called, x, values, call=call, phase=phase, evaluating=evaluating)
            if entry is not None:
                entry.sharpness = Sharpness(role, heads, deferred(numbers))
        return entry


def _without_autocast(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Return a context that turns autocast off for the device of ``x``."""
    if not torch._C._is_any_autocast_enabled():
        return contextlib.nullcontext()
    return torch.autocast(x.device.type, enabled=False)


def _heads_of(frame: Frame | None) -> int:
    """Return the number of heads of the module that a softmax runs in; 0 if unknown."""
    own = static.module_dict(frame.module) if frame is not None else {}
    return next((n for name in _HEADS if type(n := dict.get(own, name)) is int and n > 0), 0)


def _may_open(*, inference: bool) -> bool:
    """Return whether the mode may be opened: the user's code runs as it is, neither traced nor compiled."""
    return (
        (inference or torch.is_grad_enabled())
        and torch._C._functorch.maybe_current_level() is None
        and not differentiates_forward()
        and not torch.compiler.is_compiling()
        and torch._C._get_tracing_state() is None
        and is_own_run(CastMode)
        and not something_is_compiled()
    )
