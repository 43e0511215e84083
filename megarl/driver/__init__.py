"""The driver's handles on remote processes."""
