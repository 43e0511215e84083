"""How far engines and trainer disagree about the same tokens, and beyond which gap they are not running the same model."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import RolloutSettings, SyncSettings
from megarl.observe.metrics import Metric, scalars

GAP_LIMIT, GAP_WARNING = {"float32": 1e-4, "bfloat16": 0.5}, 5e-2  # of the mean |log-prob| gap between engine and trainer


def check_gap(metrics: Mapping[str, Metric], sync: SyncSettings, rollout: RolloutSettings, dtype: str) -> str | None:
    """How far engines and trainer disagree about the log-probs of the first step's responses.

    In float32 the two compute the same. In bfloat16 they round differently (the trainer routes in float32, vLLM's gate in bfloat16); no GPU
    has shown yet by how much, so without a user's limit only a gap too large for rounding ends the run. Engines that sample from a
    truncated distribution (rollout.top_p and the like) report its log-probs: then only a user's limit applies.

    Args:
        metrics: of the step.
        sync: has the user's limit.
        rollout: of the engines.
        dtype: of the trainer's model.

    Returns:
        A warning for the user, if there is one.

    Raises:
        RuntimeError: they do not run the same model.
    """
    gap = scalars(metrics).get("training/logprob_gap_mean")
    if gap is None or (rollout.cut is not None and sync.logprob_gap is None):  # no response of the step is trained on
        return None
    exact = {dtype, rollout.dtype or dtype} == {"float32"}
    expected = "float32" if exact else "bfloat16"
    limit = sync.logprob_gap or GAP_LIMIT[expected]
    measured = f"step 1: mean |log-prob of engine - of trainer| is {gap:.3g}"
    if not gap <= limit:
        raise RuntimeError(f"{measured}, more than sync.logprob_gap={limit:g}")
    if sync.logprob_gap is None and gap > GAP_WARNING:
        return f"{measured}, more than the {GAP_WARNING:g} expected in {expected} (sync.logprob_gap sets a limit)"
    return None
