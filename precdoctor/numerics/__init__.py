"""Number formats, exponent histograms and what they predict: pure functions, NumPy at most, no input or output."""

from precdoctor.numerics.formats import FORMATS, Format, format_of_dtype
from precdoctor.numerics.histogram import EXP_MAX, EXP_MIN, ExponentHistogram

__all__ = ["EXP_MAX", "EXP_MIN", "FORMATS", "ExponentHistogram", "Format", "format_of_dtype"]
