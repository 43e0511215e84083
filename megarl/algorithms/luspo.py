"""LUSPO: GSPO with each response's loss multiplied by its length (arXiv:2602.05261)."""

from typing import Literal

from pydantic import NonNegativeFloat

from megarl.algorithms.base import Fraction
from megarl.algorithms.gspo import SequenceClipped
from megarl.algorithms.ops import Aggregation


class Luspo(SequenceClipped):
    """loss = (1/B) sum_i |o_i| max(-s_i A_i, -clip(s_i, 1-low, 1+high) A_i) with GSPO's s_i: a sum over tokens that carry the same loss."""

    type: Literal["luspo"] = "luspo"
    aggregation: Aggregation = "seq-mean-token-sum"

    clip_low: Fraction = 2e-3
    """The sequence's ratio is clipped below at 1 - clip_low."""
    clip_high: NonNegativeFloat = 2.5e-3
    """The sequence's ratio is clipped above at 1 + clip_high."""
