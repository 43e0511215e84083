"""The driver's half of an RL step."""
