"""PD7xx: single ops and settings that cost precision.

Rules on *ops* read deep scans, which repeat ops in FP64 on the run's own operands: sums accumulated in 16 bits (PD701),
variances that *cancel*, that is, lose the bits in which two large moments agree (PD705), casts that lose most of a
tensor (PD706). An error counts only by its *effect*: its share of the result that it feeds. What these rules share is
in ``analyses.scans``.

PD708 reads the format of a gradient reduction, and reports it only if recorded gradients show that it matters. PD703
finds *positions* and angles that their format cannot tell apart: tables in buffers, sines in deep scans.

PD710 holds the *replicas* of a weight against one another: copies that several ranks should hold alike, by the layout
that the recorder wrote (``analyses.replicas``).

PD704 reads ``precdoctor shadow``, which runs steps again in FP32. Errors are in units *u* of half an ulp at 1; a
*piece* of code has an *own* error, and *amplifies* the errors of its inputs (``analyses.shadow_errors``).
"""
