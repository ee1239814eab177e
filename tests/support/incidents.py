"""What the log of a recorded script has on non-finite values, and what the rules make of it."""

from __future__ import annotations

import json

import precdoctor
from precdoctor.diagnosis.claims.finding import Finding
from tests.support.processes import Finished


def told(done: Finished) -> list[Finding]:
    """The findings of PD1xx."""
    found = precdoctor.diagnose(precdoctor.open_run(done.run)).findings
    return [f for f in found if f.code.startswith("PD1")]


def incidents(done: Finished) -> list[dict]:
    """The data of the events of kind ``incident``."""
    frame = precdoctor.open_run(done.run).events()
    return [json.loads(data) for data in frame[frame["event"] == "incident"]["data"]]
