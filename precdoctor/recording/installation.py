"""Installs the recorder into a process: for the boot module once torch is imported, or for ``precdoctor.record``."""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from precdoctor.recording.deepscan.op_list import OpList
from precdoctor.recording.deepscan.scan import DeepScan
from precdoctor.recording.deepscan.window import StepWindow
from precdoctor.recording.fp8.fp8_casts import Casts
from precdoctor.recording.fp8.library_quantisers import LibraryQuantisers
from precdoctor.recording.microscope.guard import Guard
from precdoctor.recording.microscope.live import LiveTrace
from precdoctor.recording.observe.backward_hooks import BackwardHooks
from precdoctor.recording.observe.forward_hooks import ForwardHooks
from precdoctor.recording.observe.frozen_and_buffers import FrozenAndBuffers
from precdoctor.recording.observe.gradient_looks import EarlyLook
from precdoctor.recording.observe.logits import Logits
from precdoctor.recording.observe.module_hooks import keyword_arguments_are_visible
from precdoctor.recording.observe.optimizer_hooks import OptimizerHooks
from precdoctor.recording.options import OPTIONS_VARIABLE, RUN_VARIABLE, RecordOptions
from precdoctor.recording.process import attach, inherited
from precdoctor.recording.process.attach import STOPPED_BY_US
from precdoctor.recording.process.fatal_exception import begin_anew, note_exits
from precdoctor.recording.recorder import Recorder
from precdoctor.recording.scene.autograd_grad_calls import TakenGradients
from precdoctor.recording.scene.compiled_calls import CompiledCalls
from precdoctor.recording.scene.loss_code import LossCode
from precdoctor.recording.scene.step_snapshot import Scene
from precdoctor.recording.shadowing.shadow import Shadow
from precdoctor.recording.steps.abandoned_attempts import AbandonedAttempts
from precdoctor.recording.steps.missing_zero_grad import KeptGradients
from precdoctor.recording.steps.optimizerless_steps import OptimizerlessSteps

if TYPE_CHECKING:
    from precdoctor.recording.applying.applier import Applier
    from precdoctor.recording.observe.compiled_modules import Probes

_installed: Recorder | None = None


def install() -> Recorder:
    """Install all hooks for the run named in the environment. A second call returns the same recorder.

    Raises:
        UsageError: the options variable does not hold recorder options.
    """
    if _installed is None:
        options = RecordOptions.from_json(os.environ.get(OPTIONS_VARIABLE, "{}"))
        recorder = _installed_for(Path(os.environ[RUN_VARIABLE]), options)
        if recorder.trace is not None:
            recorder.trace.begin_early()
        return recorder
    return _installed


def _applier(recorder: Recorder) -> Applier | None:
    """Return the object that makes the changes of ``--apply``; None, without importing its room, if there are none."""
    if not recorder.options.apply:
        return None
    from precdoctor.recording.applying.applier import Applier

    return Applier(recorder)


def recorded_into() -> Path | None:
    """Return the run directory that this process is being recorded into; None if it is not recorded."""
    return None if _installed is None or _installed.state == "off" else _installed.run


def begin(run: Path, options: RecordOptions) -> Recorder:
    """Record this process into ``run``; the process has one recorder, which serves one run after the other."""
    if _installed is None:
        return _installed_for(run, options)
    attach.begin_here()
    begin_anew()
    _installed.begin_anew(run, options)
    return _installed


def _stop_traced(recorder: Recorder) -> None:
    """End the run, because the traced step is over and the rest of the run would show nothing more."""
    recorder.close(reason="stopped", message=f"traced step {recorder.step}")
    raise SystemExit(STOPPED_BY_US)


def _stop_at(recorder: Recorder, steps: int) -> None:
    """End the run between two steps once it has made this many."""
    if recorder.state == "armed" and recorder.step - recorder.options.first_step >= steps:
        recorder.close(reason="stopped", message=f"after {steps} steps, as asked")
        attach.say(f"stopping the run after step {recorder.step - 1}, as asked")
        raise SystemExit(STOPPED_BY_US)


def _probes(recorder: Recorder) -> Probes:
    """Install the probes of compiled modules. Importing them defines an op, which only these runs need."""
    from precdoctor.recording.observe.compiled_modules import CHANGES_ROUNDING, Probes

    recorder.warnings.append(CHANGES_ROUNDING)
    probes = Probes(recorder)
    probes.install()
    return probes


def _installed_for(run: Path, options: RecordOptions) -> Recorder:
    global _installed  # noqa: PLW0603 - torch's hooks are global to the process, and so is their owner
    attach.begin_here()
    recorder = Recorder(run, options)
    if not keyword_arguments_are_visible():  # calls a module, so it runs before our hooks exist
        recorder.warnings.append("keyword arguments of modules are not visible in this torch")
    try:
        applier = _applier(recorder)
        if applier is not None:
            applier.install_before()
        probes = _probes(recorder) if options.compiled == "instrument" else None
        abandoned, casts, logits = AbandonedAttempts(recorder), Casts(recorder), Logits(recorder)
        others, scene = FrozenAndBuffers(recorder, casts), Scene(recorder)
        optimizerless = OptimizerlessSteps(recorder, abandoned, others.record)
        if scene.enabled:
            scene.deliveries.install()
        loss_code = LossCode(recorder, scene)
        scan, op_list = DeepScan(recorder), OpList(recorder)
        window = StepWindow(recorder, (op_list, scan))
        forward = ForwardHooks(recorder, optimizerless, scene, loss_code, casts, others, logits, window, probes)
        before, after = forward.install()
        calls = CompiledCalls(recorder, scene, loss_code, before, after, optimizerless.forward_begins, op_list.region,
                              instrumented=probes is not None)  # fmt: skip
        calls.install(forward.module_hooks.compiles)
        loss_code.forward_begins = optimizerless.forward_begins
        guard = Guard(recorder, scene, loss_code, scan.suspect)
        note_exits(guard.given_up.leaves)
        forward.when_evaluated = guard.evaluations.call_ended
        kept, early = KeptGradients(recorder), EarlyLook(recorder)
        BackwardHooks(recorder, optimizerless, abandoned, kept, loss_code, casts, guard, window,
                      forward.module_hooks, logits=logits, early=early).install()  # fmt: skip
        TakenGradients(recorder, scene, loss_code).install()
        LibraryQuantisers(recorder, casts).install()
        shadow = Shadow(recorder, scene) if options.shadow is not None else None
        OptimizerHooks(recorder, optimizerless, abandoned, kept, guard, scene, others, shadow, early).install()
        recorder.end_open_step = optimizerless.end_open_step
        if applier is not None:
            applier.install_after()
        window.install()
        recorder.when_step_ends.append(window.end_step)
        if options.max_steps is not None:
            recorder.when_step_begins.append(functools.partial(_stop_at, recorder, options.max_steps))
        if options.trace_steps is not None:
            recorder.trace = LiveTrace(recorder, options.trace_steps, functools.partial(_stop_traced, recorder))
    except Exception:
        recorder.state = "off"  # a half of the hooks is worse than none
        raise
    inherited.watch_forks()
    os.register_at_fork(
        before=recorder.before_fork, after_in_parent=recorder.after_fork_in_parent, after_in_child=recorder.after_fork
    )
    _installed = recorder
    return recorder
