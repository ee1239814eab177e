"""The measurements of the current step: slots, their entries, and the batch that a step hands to the drain."""
