"""What strangers' files, tight machines and sudden ends do to precdoctor: ``make torture``, ``make fuzz``."""
