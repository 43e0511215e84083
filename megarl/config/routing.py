"""Routing replay: the experts to which a mixture-of-experts model sends tokens."""

from typing import Literal

from megarl.config.section import Fraction, Section


class RoutingSettings(Section):
    """How the experts chosen for the responses' tokens are replayed and compared."""

    replay: Literal["off", "r2", "r3"] = "off"
    """The experts that the policy's updates use. off: those that its routers choose; r2: those chosen in the forward pass that computed the
    old log-probs; r3: the engine's, in that pass and in the updates."""
    reference: bool = False
    """With r3: the reference uses the engine's experts too."""
    critic: bool = False
    """The critic's updates use the experts that produced its values."""
    sample: Fraction = 0.01
    """Share of the responses whose experts the engine reports for the metrics, at least one per rollout; 0: none. With r3 it is 1."""
    alarm: Fraction = 0.1
    """Raise an alarm, which names the remedy, if engine and trainer, or old and new policy, differ in more than this share of their
    choices of experts."""

    @property
    def follows(self) -> bool:
        """Whether the policy's expert choices are recorded at all."""
        return self.replay != "off" or self.sample > 0

    @property
    def reported(self) -> float:
        """The share of the responses whose experts the engine reports."""
        return 1.0 if self.replay == "r3" else self.sample
