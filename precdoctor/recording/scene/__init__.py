"""What a replay of the current step needs: root calls, loss code and saved states, held until the step ends."""
