"""``record --apply``: the changes of a prescription file, made inside the training process.

The one place where recording changes a training, and only where it was asked to. The files of the user's program stay
as they are: classes of torch are patched, flags set, optimizers and modules adjusted as they are met. Every change is
printed on stderr and logged as an ``applied`` event, and so is every one that found nothing to act on.
"""
