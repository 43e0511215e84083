"""Mends of upstream faults."""
