"""Prescriptions that several families give, and which advice is worth giving first."""
