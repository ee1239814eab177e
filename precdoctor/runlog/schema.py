"""The tables of a run log: every column with its type and meaning. Writer, readers and checks all use these schemas.

The names of the files that hold the tables are in :mod:`precdoctor.runlog.files`.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

KINDS: Final = (
    "batch",  # floating-point leaves of a root module's arguments
    "input",  # a module argument that is neither batch nor output in this forward: functional code made it
    "output",
    "grad_output",  # gradient with respect to an output; carries the loss scale
    "weight",  # the values the step's forward used, taken just before the optimizer changes them
    "weight_grad",  # accumulated at the last micro-step; rank-local, before reduction, unscaling and clipping
    "weight_grad_step",  # the gradient that the optimizer reads: reduced, unscaled, clipped
    "update",  # weight after minus weight before, as stored
    "buffer",
    "opt_state",
    "master_weight",
    "loss",  # the tensor given to backward; carries the loss scale
    "fp8_operand",
    "subbyte_operand",  # operand of a cast to a format of fewer than 8 bits: FP4, FP6
    "block_scale",  # the multiplier of each row or block, of an operand or a state that has several
    "logits",  # the input of a softmax, a sample of its rows; masked positions are zeros
    "kv_key",  # inference runs: the keys in the attention's cache, sequences x heads x tokens x features
    "kv_value",
)
PHASES: Final = ("train", "no_grad", "recompute")
#: Values of the column ``phase`` of the table ``ops``.
OP_PHASES: Final = ("forward", "loss", "backward", "recompute", "optimizer", "script")
EVENTS: Final = (
    *("nonfinite", "incident", "op", "scan", "scaler", "clip", "applied", "casts", "drop"),
    *("sampling", "warning", "error", "ops"),
)

_counts = pa.list_(pa.int64())
_name = pa.dictionary(pa.int32(), pa.string())

#: One row per tensor and step; key ``(step, rank, root, module, kind, name, call)``.
TENSORS: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),  # optimizer-step attempts, from 0
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("root", _name, nullable=False),  # class of the top-level module + "#n"
        pa.field("module", _name, nullable=False),  # FQN below the root, no wrapper prefixes; "" is the root
        pa.field("module_class", _name),
        pa.field("kind", _name, nullable=False),
        pa.field("name", _name, nullable=False),  # parameter, buffer or leaf; "" when there is just one leaf
        pa.field("call", pa.int32(), nullable=False),  # number of the call in its micro-step, from 0; 15: 15 or more
        pa.field("phase", _name),
        pa.field("dtype", _name, nullable=False),  # torch spelling without "torch."
        pa.field("shape", pa.list_(pa.int64())),  # of the last tensor merged into the row
        pa.field("numel", pa.int64(), nullable=False),  # elements counted, all merged tensors together
        pa.field("micro_step", pa.int32()),  # of the last tensor merged into the row
        pa.field("first_bad_micro_step", pa.int32()),
        pa.field("order", pa.int64()),  # execution order on the device of the first tensor; null in wider merges
        pa.field("first_bad_order", pa.int64()),  # ... of the first tensor that held a NaN or an Inf
        pa.field("nan", pa.int64(), nullable=False),
        pa.field("pos_inf", pa.int64(), nullable=False),
        pa.field("neg_inf", pa.int64(), nullable=False),
        pa.field("zero", pa.int64(), nullable=False),
        pa.field("subnormal", pa.int64(), nullable=False),  # by the tensor's own dtype
        pa.field("at_max", pa.int64(), nullable=False),  # |x| equal to the dtype's largest finite value
        pa.field("amax", pa.float64()),  # finite elements only; null when there is none; 0.0 when all are zero
        pa.field("amin_nonzero", pa.float64()),  # null when no finite element is non-zero
        pa.field("sum", pa.float64()),
        pa.field("sum_sq", pa.float64()),
        pa.field("exp_lo", pa.int32()),  # bin of exp_hist[0]; see numerics.histogram
        pa.field("exp_hist", _counts),
        pa.field("fingerprint", pa.uint64()),  # null in merges
        pa.field("scale", pa.float64()),  # the multiplier in force (loss scale, quantiser scale); null: none
        pa.field("format", _name),  # narrow format of a cast that really ran; saturated and flushed are then exact
        pa.field("saturated", pa.int64()),
        pa.field("flushed", pa.int64()),
        pa.field("unchanged", pa.int64()),  # update rows: bits equal after the step although an update was intended
        pa.field("rel_lo", pa.int32()),  # update rows: bins of exponent(intended dw) - exponent(w)
        pa.field("rel_hist", _counts),
        pa.field("block16_hist", _counts),  # bin r: elements r binades below their block's amax; last bin: r or more
        pa.field("block32_hist", _counts),
        pa.field("block128_hist", _counts),
        pa.field("block16_amax_lo", pa.int32()),
        pa.field("block16_amax_hist", _counts),
        pa.field("block32_amax_lo", pa.int32()),
        pa.field("block32_amax_hist", _counts),
        pa.field("block128_amax_lo", pa.int32()),
        pa.field("block128_amax_hist", _counts),
        pa.field("role", _name),  # logits rows: attention, output or router; null if unknown
        pa.field("entropy", pa.float64()),  # logits rows: entropy of the softmax, mean over rows, nats
        pa.field(
            "head_max", pa.list_(pa.float64())
        ),  # logits rows: the largest logit of each head, masked positions left out
        pa.field(
            "head_entropy", pa.list_(pa.float64())
        ),  # ... the entropy of each head, divided by the logarithm of the number of keys
        *(
            pa.field(f"{grouping}_{part}", kind)  # of inference runs; see numerics.group_prediction
            for grouping in ("token", "channel", "head", "group128")
            for part, kind in (("hist", _counts), ("energy", pa.list_(pa.float64())))
        ),
    ]
)

#: One row per (step, optimizer).
STEPS: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("optimizer", _name, nullable=False),  # class + "#n"; "" for a step that never reached its optimizer
        pa.field("complete", pa.bool_(), nullable=False),  # false: the run died inside this step
        pa.field("wall_time", pa.float64()),  # seconds since the epoch, at the end of the step
        pa.field("micro_steps", pa.int32()),
        pa.field("loss", pa.float64()),  # unscaled, summed over micro-steps whose gradients were used
        pa.field("lr", pa.float64()),  # largest over the parameter groups
        pa.field("lrs", pa.list_(pa.float64())),
        pa.field("grad_norm", pa.float64()),  # L2, unscaled, before clipping, rank-local
        pa.field("clip_norm", pa.float64()),  # the limit given to clip_grad_norm_ / clip_grad_value_
        pa.field("clipped_before_unscale", pa.bool_()),
        pa.field("loss_scale", pa.float64()),  # the multiplier the backward pass ran with
        pa.field("growth_tracker", pa.int64()),
        pa.field("found_inf", pa.bool_()),  # null without a GradScaler
        pa.field("skipped", pa.bool_()),  # the optimizer did not change the weights, or the script did not call it
        pa.field("autocast_dtype", _name),
        pa.field("lost_update_fraction", pa.float64()),  # of the intended non-zero updates of this step's update rows
        pa.field("non_finite", pa.int64()),  # tensors with a NaN or Inf among loss, weight gradients, weights, updates
        pa.field("sampled", pa.bool_(), nullable=False),  # full statistics were taken
        pa.field("recorder_ns", pa.int64()),  # host time in the recorder's hooks, and CPU time of its writing
        pa.field("wait_ns", pa.int64()),  # time that the hooks waited for the device; not in recorder_ns
        pa.field("device_ns", pa.int64()),  # device time of the recorder's kernels; null if not measured
        pa.field("step_ns", pa.int64()),  # wall time from the previous step's end to this one's
    ]
)

EVENT_LOG: Final = pa.schema(
    [
        pa.field("id", pa.string(), nullable=False),  # unique within a rank directory
        pa.field("parent_id", pa.string()),
        pa.field("step", pa.int64()),
        pa.field("micro_step", pa.int32()),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("time_ns", pa.int64(), nullable=False),  # since the epoch
        pa.field("event", pa.string(), nullable=False),  # one of EVENTS
        pa.field("root", pa.string()),
        pa.field("module", pa.string()),
        pa.field("op", pa.string()),
        pa.field("file", pa.string()),
        pa.field("line", pa.int32()),
        pa.field("code", pa.string()),
        pa.field("data", pa.string()),  # JSON object
    ]
)

#: One row per tensor that an op read or made, on the steps of ``record --ops``; key ``(step, rank, index, side,
#: position)``. An op that computes nothing (a view, uninitialised memory) has no rows.
OPS: Final = pa.schema(
    [
        pa.field("step", pa.int64(), nullable=False),
        pa.field("rank", pa.int32(), nullable=False),
        pa.field("micro_step", pa.int32()),
        pa.field("index", pa.int64(), nullable=False),  # number of the op in its step, in order of start, from 0
        pa.field("op", _name, nullable=False),  # "aten.mul.Tensor"; "compiled.forward" and "compiled.backward"
        pa.field("phase", _name, nullable=False),  # forward, loss, backward, recompute, optimizer or script
        pa.field("root", _name, nullable=False),
        pa.field("module", _name, nullable=False),  # whose forward ran the op; for a backward op, its forward op
        pa.field("file", _name),
        pa.field("line", pa.int32()),
        pa.field("code", _name),
        pa.field("settings", _name),  # JSON object: the arguments that are not tensors
        pa.field("side", _name, nullable=False),  # "in" or "out"
        pa.field("position", pa.int32(), nullable=False),  # among the op's tensors of that side
        pa.field("argument", _name),  # name of the argument in the op's schema; null for results
        pa.field("name", _name),  # of a parameter or buffer
        pa.field("producer", pa.int64()),  # side "in": index of the op of this step that wrote it last; null: none
        pa.field("dtype", _name, nullable=False),
        pa.field("shape", pa.list_(pa.int64())),
        pa.field("numel", pa.int64(), nullable=False),
        pa.field("fingerprint", pa.uint64()),  # null if the tensor has no dense memory
        pa.field("nan", pa.int64()),
        pa.field("pos_inf", pa.int64()),
        pa.field("neg_inf", pa.int64()),
        pa.field("amax", pa.float64()),
        pa.field("sum", pa.float64()),
        pa.field("sum_sq", pa.float64()),
        pa.field("sketch", pa.list_(pa.float64())),  # eight sums with fixed signs; see numerics.sketch
    ]
)

TABLES: Final[dict[str, pa.Schema]] = {"tensors": TENSORS, "steps": STEPS, "events": EVENT_LOG, "ops": OPS}
