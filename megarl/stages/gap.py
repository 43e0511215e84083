"""How far engines and trainer disagree about the same tokens, and the gap beyond which they are not running the same model."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import RolloutSettings, SyncSettings
from megarl.observe.metrics import Metric, scalars

# Of the mean |log-prob| gap between engine and trainer.
GAP_LIMIT = {"float32": 1e-4, "bfloat16": 0.5, "fp8": 0.5}
GAP_WARNING = {"float32": 5e-2, "bfloat16": 5e-2, "fp8": 0.1}


def check_gap(metrics: Mapping[str, Metric], sync: SyncSettings, rollout: RolloutSettings, dtype: str) -> str | None:
    """Check how far engines and trainer disagree about the log-probs of the first step's responses.

    In float32 both compute the same. In bfloat16 they round differently (the trainer routes in float32, vLLM's gate in bfloat16); by how
    much has not yet been measured on a GPU, so without a user's limit only a gap too large for rounding ends the run. fp8 engines round
    weights and inputs to four significant bits: their gap is larger, and algorithm.correction accounts for it. Engines that sample
    from a truncated distribution (rollout.top_p and the like) report that distribution's log-probs: then only a user's limit applies.

    Args:
        metrics: the step's metrics.
        sync: the section `sync`, with the user's limit.
        rollout: the section `rollout`.
        dtype: the dtype of the trainer's model.

    Returns:
        A warning for the user, or None.

    Raises:
        RuntimeError: engines and trainer do not run the same model.
    """
    gap = scalars(metrics).get("training/logprob_gap_mean")
    if gap is None or (rollout.cut is not None and sync.logprob_gap is None):  # gap None: no response of the step is trained on
        return None
    exact = {dtype, rollout.dtype or dtype} == {"float32"}
    expected = rollout.quantization or ("float32" if exact else "bfloat16")
    limit = sync.logprob_gap or GAP_LIMIT[expected]
    measured = f"step 1: mean |log-prob of engine - of trainer| is {gap:.3g}"
    if not gap <= limit:
        raise RuntimeError(f"{measured}, more than sync.logprob_gap={limit:g}")
    if sync.logprob_gap is None and gap > GAP_WARNING[expected]:
        return f"{measured}, more than the {GAP_WARNING[expected]:g} expected in {expected} (sync.logprob_gap sets a limit)"
    return None
