"""One file per verb that runs."""
