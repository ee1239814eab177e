"""What a step has measured so far: slots, their entries, and the step as the other rooms see it."""
