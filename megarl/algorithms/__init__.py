"""The algorithms: one file each, pure functions of tokens. `Algorithm` is the union that a config's `algorithm.type` chooses from."""

from typing import Annotated

from pydantic import Field

from megarl.algorithms.base import Loss, PolicyAlgorithm
from megarl.algorithms.grpo import Grpo
from megarl.algorithms.gspo import Gspo

Algorithm = Annotated[Grpo | Gspo, Field(discriminator="type")]

__all__ = ["Algorithm", "Grpo", "Gspo", "Loss", "PolicyAlgorithm"]
