"""The deep scan: examines the ops of a few healthy steps as they run, for what module outputs cannot show."""
