"""Fixtures of the examples' tests."""

from tests.e2e.conftest import lab as lab
