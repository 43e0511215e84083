"""How far engines and trainer disagree about the same tokens, and the gap beyond which they are not running the same model."""

from collections.abc import Mapping

from megarl.config import RolloutSettings, SyncSettings
from megarl.observe.metrics import Metric, scalars

# Of the mean |log-prob| gap between engine and trainer, in nats per token.
ROUNDED = {"float32": 1e-4, "bfloat16": 0.5, "fp8": 0.5}  # the most that rounding in the model's layers explains
GAP_WARNING = {"bfloat16": 5e-2, "fp8": 0.1}
UNIT = 2.0**-24  # the unit roundoff of float32, in which log-probs are computed whatever the model's dtype is
LANES = 8  # partial sums of a loop over float32 in AVX2, the fewest among the CPUs and GPUs on which an engine runs


def gap_limit(expected: str, vocabulary: int) -> float:
    """Return the largest mean |log-prob| gap that rounding can cause, in nats per token.

    A log-prob is x_t - log S with S = sum_v exp(x_v) over the V tokens of the vocabulary, computed in float32 on both sides.

        limit(V) = max(r, V u / w),   u = 2^-24, w = 8

    r bounds what the model's layers add to the logits x: 1e-4 in float32, where both sides compute the same (measured: 2e-7 to 1e-5).
    V u / w bounds the error of log S: a float32 sum of n positive terms, one after another, has a relative error of at most n u (Higham,
    Accuracy and Stability of Numerical Algorithms, 4.2), w lanes have n = V / w terms each, and d log S = dS / S. At V = 151,936 that is
    1.1e-3, of which torch's own log_softmax on a CPU reaches 3e-4; pairwise sums, as the ranks' and our CPU engines' are, stay below 1e-6.
    Up to V = 13,421, and with bfloat16 or fp8 for every vocabulary, the limit is r.

    Args:
        expected: the coarsest arithmetic of both sides, a key of `ROUNDED`.
        vocabulary: V.
    """
    return max(ROUNDED[expected], vocabulary * UNIT / LANES)


def check_gap(
    metrics: Mapping[str, Metric], sync: SyncSettings, rollout: RolloutSettings, logp_over: str, dtype: str, vocabulary: int
) -> str | None:
    """Check how far engines and trainer disagree about the log-probs of the first step's responses.

    In float32 both compute the same. In bfloat16 they round differently (the trainer routes in float32, vLLM's gate in bfloat16); by how
    much has not yet been measured on a GPU, so without a user's limit only a gap too large for rounding ends the run. fp8 engines round
    weights and inputs to four significant bits: their gap is larger, and algorithm.correction accounts for it. Engines that sample
    from a truncated distribution (rollout.top_p and the like) report that distribution's log-probs: unless the trainer's are over the same
    kept tokens, only a user's limit applies.

    Args:
        metrics: the step's metrics.
        sync: the section `sync`, with the user's limit.
        rollout: the section `rollout`.
        logp_over: `train.logp_over`.
        dtype: the dtype of the trainer's model.
        vocabulary: tokens in the model's vocabulary.

    Returns:
        A warning for the user, or None.

    Raises:
        RuntimeError: engines and trainer do not run the same model.
    """
    gap = scalars(metrics).get("training/logprob_gap_mean")
    of_another = rollout.cut is not None and logp_over == "all"
    if gap is None or (of_another and sync.logprob_gap is None):  # gap None: no response of the step is trained on
        return None
    exact = {dtype, rollout.dtype or dtype} == {"float32"}
    expected = rollout.quantization or ("float32" if exact else "bfloat16")
    measured = f"step 1: mean |log-prob of engine - of trainer| is {gap:.3g}"
    if sync.logprob_gap is not None:
        if not gap <= sync.logprob_gap:
            raise RuntimeError(f"{measured}, more than sync.logprob_gap={sync.logprob_gap:g}")
        return None
    if not gap <= (limit := gap_limit(expected, vocabulary)):
        raise RuntimeError(
            f"{measured}, more than sync.logprob_gap={limit:.3g}, the most that rounding explains in {expected} with a vocabulary of "
            f"{vocabulary:,}: engines and trainer do not compute the same model (other weights, settings or kernels); if they are meant to "
            "differ, set sync.logprob_gap to what you accept, and algorithm.correction"
        )
    if gap > GAP_WARNING.get(expected, limit):
        return f"{measured}, more than the {GAP_WARNING[expected]:g} expected in {expected} (sync.logprob_gap sets a limit)"
    return None
