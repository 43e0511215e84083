"""Fixtures of the examples' tests."""

from __future__ import annotations

from tests.e2e.conftest import lab as lab
