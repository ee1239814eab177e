"""The replays of a run by rank and step, those of a second run included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from precdoctor.diagnosis.analyses.op_facts import Replay, replay_of
from precdoctor.diagnosis.survey.rows import grouped, integer, text
from precdoctor.diagnosis.survey.view import Process, RunView, remembered
from precdoctor.errors import PrecdoctorError
from precdoctor.runlog import open_run
from precdoctor.runlog.files import AUTOPSY_DIR


def replay_at(view: RunView, process: Process, step: int) -> Replay | None:
    """Return the replay of a step; None if there is none."""
    return _replays(view).get((process.rank, step))


def poisoned_steps(view: RunView, process: Process) -> tuple[int, ...]:
    """Return the steps that made a buffer or optimizer state non-finite while loss and gradients stayed finite."""
    return tuple(sorted(step for (rank, step), r in _replays(view).items() if rank == process.rank and r.target))


def replayed_steps(view: RunView, process: Process) -> dict[int, str]:
    """Return the non-finite steps that their own columns may not show, with the kind of each one's first tensor.

    They are those of a live trace, those that the script gave up, and those whose optimizer spoilt the weights.
    """
    kinds = {"forward": "loss", "backward": "weight_grad", "optimizer": "weight"}
    own = [(step, r) for (rank, step), r in sorted(_replays(view).items()) if rank == process.rank]
    shown = ((s, r) for s, r in own if r.live or r.given_up or (r.phase == "optimizer" and not r.target))
    return {step: kinds.get(r.phase, "loss") for step, r in shown}


@remembered
def _replays(view: RunView) -> dict[tuple[int, int], Replay]:
    """Return the replays by rank and step.

    The live trace of the second run covers more ops, so its replays with an origin replace those of the first run.
    """
    found = _own_replays(view)
    if (again := second_run_of(view)) is not None:
        for at, r in _own_replays(again).items():
            if r.outcome == "origin":
                own = found.get(at, r)
                if not r.origins and any(kind == "batch" for kind, _, _ in own.externals):
                    found[at] = replace(own, made_outside=r.made_outside)  # the replay has the counts of that tensor
                    continue
                found[at] = replace(
                    r, bad_settings=own.bad_settings, bad_data=own.bad_data, data_is_finite=own.data_is_finite
                )
    return found


def second_run_of(view: RunView) -> RunView | None:
    """Return the traced run that ``precdoctor autopsy`` wrote into the run's directory; None without a readable one."""
    path = Path(view.run.path) / AUTOPSY_DIR
    if not path.is_dir():
        return None
    try:
        again = RunView(open_run(path))
        return again if again.processes else None
    except PrecdoctorError:
        return None


def _own_replays(view: RunView) -> dict[tuple[int, int], Replay]:
    events = view.events_of("incident", "op")
    ops = grouped((text(event.get("parent_id")), event) for event in events if event["event"] == "op")
    found: dict[tuple[int, int], Replay] = {}
    for event in events:
        rank, step = integer(event.get("rank")), integer(event.get("step"))
        if event["event"] != "incident" or rank is None or step is None:
            continue
        replay = replay_of(event, ops.get(text(event.get("id")), ()))
        if replay.evaluation:
            step = max(0, step - 1)
        known = found.get((rank, step))
        if known is not None and known.evaluation and replay.evaluation:  # the loss of the same evaluation, say
            replay = replace(known, bad_samples=max(known.bad_samples, replay.bad_samples))
        if known is None or known.target or known.evaluation:
            found[rank, step] = replay  # loss and gradients precede buffers and calls without gradients
    return found
