"""A real FP16 training under a real GradScaler, recorded, and its scaler simulated from the log alone."""

from __future__ import annotations

import json

import pytest

from precdoctor import open_run
from precdoctor.diagnosis.offline.replay.loss_scale import replay_loss_scale, used_policy
from precdoctor.diagnosis.survey.view import RunView
from precdoctor.numerics.loss_scaling import ScalerPolicy
from tests.support.processes import record, script, warm

#: Accumulation over two micro-steps, clipping, a scale that is too large at first and grows quickly.
TRAIN = """
import json
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_factor=3.0, backoff_factor=0.25, growth_interval=5)
course = []
for step in range(60):
    state = [scaler.get_scale(), scaler._get_growth_tracker()]
    for _ in range(2):
        x = torch.randn(16, 8) * (40.0 if step == 33 else 1.0)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = (model(x).float() - x[:, :4]).square().mean() / 2
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = model[0].weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    course.append([*state, bool(torch.equal(before, model[0].weight.detach()))])
print(json.dumps(course))
"""


@pytest.mark.slow
def test_the_recorded_course_is_simulated_step_by_step(tmp_path):
    script(tmp_path, "train.py", TRAIN)
    done = record(tmp_path, "--every", "4", "--", *warm("train.py"))
    assert done.status == 0, done.err
    course = json.loads(done.out)
    view = RunView(open_run(done.run))
    policy = used_policy(view)
    assert policy == ScalerPolicy(init=2.0**22, growth=3.0, backoff=0.25, interval=5)
    answer = replay_loss_scale(view, policy)
    assert [[s.scale, s.growth_tracker, s.overflow] for s in answer.replay.steps] == course
    assert list(answer.recorded_scales) == [scale for scale, _, _ in course]
    assert sum(skipped for _, _, skipped in course) >= 4  # it did have something to do
    assert answer.replay.uncertain_steps == 0 and answer.run.sampled == 15
    calmer = replay_loss_scale(view).replay
    assert len(calmer.overflow_steps) < len(answer.recorded_overflows)
