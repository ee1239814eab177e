"""``record --apply``: makes the changes of a prescription file inside the training process.

The one place where recording changes a training, and only on request. The user's source files stay as they are: torch
classes are patched, flags are set, optimizers and modules are changed when they are first seen. Each change is printed
on stderr and logged as an ``applied`` event, also if it could not be made.
"""
