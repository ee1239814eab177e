"""Recording: code that runs inside the user's training process and writes the run log.

How a tensor becomes a row, room by room (``tests/unit/test_rooms.py`` states which room may import which):

1. ``process`` gets into the process and out of it: boot, launch, signals, threads, memory limits.
2. ``model`` names a tensor's module and parameter; ``ops`` reads facts of single operations.
3. ``observe``, at the top, holds torch's hooks. A hook finds the tensors and asks the recorder for their ``Site``.
4. ``slots`` maps a site to a slot; ``kernels`` add the tensor's statistics to that slot, on its device.
5. ``recorder`` ends the step: a snapshot of the slots and the ``StepFacts`` go into a queue.
6. ``output`` takes them from the queue in its own thread, makes rows, and writes them to the log.

Beside this path: ``steps`` follows optimizers, scalers and clipping; ``fp8`` follows casts; ``applying`` makes the
changes of ``--apply``. ``scene`` keeps what a replay needs, ``microscope`` replays or traces a bad step, ``deepscan``
audits the ops of a healthy one, and ``shadowing`` compares a step with a wide reference. Rooms that only observe take a
``StepContext``, never the ``Recorder``. ``installation`` creates all of them; ``session`` records a block.

Invariants:

- Training stays bitwise identical, except with ``--apply``, ``--on-nonfinite skip`` or ``--compiled instrument``.
- Hooks run no code of the user's classes when they read objects: ``model.static`` and ``model.containers`` read
  instead. Only replays call the model again, and they restore what the call changes.
- Nothing raises into training: every hook body is wrapped by ``recorder.hook_guard``. The third internal error turns
  recording off. A run stops only if the user asked for it.
- Of the hooks only the guard waits for a device in each step: once, twice on sampled steps, never with ``--on-nonfinite
  observe``. Replays wait also, and rare checks: for master copies, skipped updates of a scaler, discarded gradients.
- A forked child starts anew: every object that remembers the parent's run registers in ``when_forked``.
"""
