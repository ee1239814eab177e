"""Number formats, exponent histograms and what they predict: pure functions, NumPy at most, no input or output."""

from precdoctor.numerics.formats import FORMATS, SCALE_FORMATS, Format, format_of_dtype
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram, Interval

__all__ = [
    "EXP_MAX",
    "EXP_MIN",
    "FORMATS",
    "SCALE_FORMATS",
    "ExponentHistogram",
    "Format",
    "Interval",
    "format_of_dtype",
]
