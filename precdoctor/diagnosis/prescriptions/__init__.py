"""Prescriptions as a file: changes with effects computed from the log, to be applied and compared with a second run."""
