"""The deep scan: a few healthy steps traced op by op as the run makes them, for what module outputs cannot show."""
