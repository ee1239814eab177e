from __future__ import annotations

import pytest

from precdoctor.diagnosis.claims.finding import Source


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("/opt/venv/lib/python3.11/site-packages/transformers/activations.py", "transformers/activations.py"),
        ("/usr/lib/python3/dist-packages/torch/nn/functional.py", "torch/nn/functional.py"),
        ("models/my_site-packages.py", "models/my_site-packages.py"),
        ("/home/me/train.py", "/home/me/train.py"),
    ],
)
def test_files_of_packages_are_told_as_they_are_imported(file, told):
    assert Source.read(file, 66, "") == Source(told, 66, None)
