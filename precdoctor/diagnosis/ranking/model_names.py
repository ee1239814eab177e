"""Findings that say which model and which part of a parallel layout they are about, where a run has several."""

from __future__ import annotations

from dataclasses import replace

from precdoctor.diagnosis.claims.finding import Finding
from precdoctor.diagnosis.survey.replicas import coordinates
from precdoctor.diagnosis.survey.view import RunView


def with_model(view: RunView, finding: Finding) -> Finding:
    """The finding, its title ending in the model its module belongs to if that is in doubt and not yet said.

    `main.3` may be in either half of a GAN.
    """
    root = finding.location.root
    if root is None or len(view.models) < 2 or root not in view.models:
        return finding
    if not finding.location.module or root in finding.title:
        return finding
    return replace(finding, title=f"{finding.title} (in {root})")


def with_coordinates(view: RunView, finding: Finding) -> Finding:
    """The finding, its location holding the coordinates of its rank in a run of several."""
    rank = finding.location.rank
    if rank is None or not (place := coordinates(view, rank)):
        return finding
    return replace(finding, location=replace(finding.location, coordinates=place))
