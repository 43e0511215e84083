"""Stop and go on: saves, recovery, the best step."""
