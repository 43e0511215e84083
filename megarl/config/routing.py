"""Which experts the tokens of a mixture-of-experts model are sent to."""

from __future__ import annotations

from typing import Literal

from megarl.config.section import Fraction, Section


class RoutingSettings(Section):
    """The experts of the responses' tokens: replayed, and compared."""

    replay: Literal["off", "r2", "r3"] = "off"
    """Experts in the policy's updates. off: as its routers choose; r2: those of the old log-probs; r3: the engine's, for both."""
    reference: bool = False
    """With r3: the reference uses the engine's experts too."""
    critic: bool = False
    """The critic's updates use the experts that produced its values."""
    sample: Fraction = 0.01
    """Share of the responses whose experts the engine reports for the metrics, at least one per rollout; 0: none. With r3 it is 1."""
    alarm: Fraction = 0.1
    """Share of choices in which engine and trainer, or old and new policy, differ, above which an alarm names the remedy."""

    @property
    def follows(self) -> bool:
        """Whether the policy's routers are followed at all."""
        return self.replay != "off" or self.sample > 0

    @property
    def reported(self) -> float:
        """The share of the responses whose experts the engine reports."""
        return 1.0 if self.replay == "r3" else self.sample
