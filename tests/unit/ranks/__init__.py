"""Tests of a rank's work. Their modules import Megatron, and the backend must come before it."""

from megarl.parallel.backend import choose

choose()
