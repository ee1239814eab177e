"""The changes that can be made, and what is said of one that cannot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precdoctor.errors import UsageError
from precdoctor.runlog.changes import SETTINGS, Change

VALUES = {
    "module.dtype": st.sampled_from(["float32", "bfloat16"]),
    "module.casts": st.sampled_from(["weight E4M3FN tensor", "weight E4M3FN tensor, grad_output E5M2 tensor"]),
    "autocast.dtype": st.just("bfloat16"),
    "scaler.init_scale": st.floats(1e-30, 1e30),
    "scaler.growth_interval": st.integers(1, 10**9),
    "scaler.min_scale": st.floats(1e-30, 1e30),
    "scaler.enabled": st.just(False),
    "optimizer.eps": st.floats(1e-30, 1.0),
    "optimizer.master_weights": st.just("float32"),
    "optimizer.clip_order": st.just("unscale-first"),
    "flag.float32_matmul_precision": st.sampled_from(["highest", "high", "medium"]),
}


@st.composite
def changes(draw):
    name = draw(st.sampled_from(sorted(SETTINGS)))
    module = draw(st.text()) if SETTINGS[name].of_module else ""
    root = draw(st.text(min_size=not module)) if SETTINGS[name].of_module else ""
    return Change(name, draw(VALUES.get(name, st.booleans())), draw(st.none() | st.integers()), root, module)


@given(changes())
def test_a_change_comes_back_from_what_it_writes(change):
    assert Change.of(change.as_dict(), "x") == change


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        ({"setting": "scaler.init_scal", "to": 1.0}, "did you mean 'scaler.init_scale'"),
        ({"setting": "lr", "to": 1.0}, "known: module.dtype"),
        ({"setting": ["scaler.init_scale"], "to": 1.0}, "no setting"),
        ({"setting": "scaler.init_scale"}, "takes a number above 0, got nothing"),
        ({"setting": "scaler.init_scale", "to": -1.0}, "takes a number above 0, got -1.0"),
        ({"setting": "scaler.init_scale", "to": True}, "got True"),
        ({"setting": "scaler.init_scale", "to": float("inf")}, "got inf"),
        ({"setting": "scaler.init_scale", "to": 10**400}, "takes a number above 0"),
        ({"setting": "scaler.growth_interval", "to": 0}, "a number of steps from 1"),
        ({"setting": "scaler.enabled", "to": True}, "takes false"),
        ({"setting": "module.dtype", "to": "float32"}, "needs the name of a module, or of a root"),
        ({"setting": "module.dtype", "to": "float64", "module": "a"}, '"float32" or "bfloat16"'),
        ({"setting": "optimizer.eps", "to": 1e-8, "module": "a"}, "is of no module"),
        ({"setting": "optimizer.eps", "to": 1e-8, "root": "GPT#0"}, "is of no module"),
        ({"setting": "optimizer.eps", "to": 1e-8, "then": 1}, "not 'then'"),
        ("optimizer.eps", "a change is a table"),
    ],
)
def test_what_cannot_be_made_is_refused_in_a_sentence(raw, says):
    with pytest.raises(UsageError, match="^fix.toml: ") as error:
        Change.of(raw, "fix.toml")
    assert says in str(error.value)
