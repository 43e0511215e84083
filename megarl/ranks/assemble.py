"""Assembly of one rank's batches from a step's plan, and metrics that compare the engine's log-probs with the trainer's.

Axes: T predicted tokens, N responses of the step, S samples (see `step_plan`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import ray

from megarl.algorithms import PolicyAlgorithm
from megarl.algorithms.correction import BOUND, Correction
from megarl.algorithms.distillation import divergence
from megarl.algorithms.ops import SumOver
from megarl.batch import Batch, Sample, pack
from megarl.images import PlacedImage
from megarl.lazy_torch import Tensor, torch
from megarl.observe.metrics import Max, Mean, Metric, SampleShare, Std
from megarl.ranks.step_plan import StepPlan, loss_weights

Columns = list[tuple[list[int], Any]]
"""What one group of ranks computed for another: per micro-batch its samples, and a reference to a list of column dicts, one for each."""


def fetch(payload_N: Sequence[Any], members: Sequence[int]) -> list[Sample]:
    """Fetch the samples of the responses `members` (indices into the N axis), in that order."""
    return ray.get([payload_N[n] for n in members])


def routed_experts(plan: StepPlan, members: Sequence[int], length_N: Tensor, layers: Sequence[int]) -> Tensor | None:
    """Fetch the experts that the engine chose for the tokens of some responses, for only the stages that hold `layers`.

    Args:
        plan: the step's plan.
        members: the responses, as indices into the N axis.
        length_N: int64, the number of entries of each.
        layers: the model's layers for which to fetch them.

    Returns:
        int16 [T, L, K], L in the order of `layers`, -1 at entries for which the engine reported none; None if it reported none at all.
    """
    ends = length_N.cumsum(0).tolist()
    reported = [(end, parts) for end, parts in zip(ends, (plan.experts_N[n] for n in members), strict=True) if parts is not None]
    if not layers or not reported:
        return None
    stages = [number for number, stage in enumerate(plan.stages) if not set(stage).isdisjoint(layers)]
    layers_kept = [layer for number in stages for layer in plan.stages[number]]
    order = [layers_kept.index(layer) for layer in layers]
    fetched = ray.get([part[number] for _, parts in reported for part in parts for number in stages])
    experts_TLK = np.full((ends[-1], len(layers), fetched[0].shape[2]), -1, dtype=np.int16)
    by_stage = iter(fetched)
    for end, parts in reported:
        rows = [np.concatenate(list(islice(by_stage, len(stages))), axis=1) for _ in parts]
        place = end - sum(map(len, rows))
        for part in rows:
            experts_TLK[place : place + len(part)] = part[:, order]
            place += len(part)
    return torch.from_numpy(experts_TLK)


def assemble(plan: StepPlan, chosen: Sequence[int], layers: Sequence[int] = ()) -> Batch:
    """Pack some samples of the plan into one batch, with rewards and weights; those of responses that are not kept have no loss token.

    Args:
        plan: the step's plan.
        chosen: the samples, as ascending indices into the S axis. Those of one response are one sequence of the batch.
        layers: the layers for which `extra_T["routed_experts"]` holds the experts that the engine chose, as far as they are known.
    """
    members = plan.responses(chosen)
    samples = fetch(plan.payload_N, members)
    batch = pack(samples)
    if plan.turn_weight:
        batch = batch.with_extra(turn_reward=plan.turn_weight * turn_rewards(samples))
    experts_TLK = routed_experts(plan, members, batch.length_N, layers)
    if experts_TLK is not None:
        batch = batch.with_extra(routed_experts=experts_TLK)
    if (plan.part_N & ~plan.keep_N).any():  # they are compared with others by their KL, too, if it is in the reward
        batch = batch.with_extra(compared=batch.mask_T)
    keep_N = torch.tensor(plan.keep_N[list(members)], dtype=torch.bool)
    batch = replace(batch, mask_T=batch.mask_T & batch.spread(keep_N), count_N=batch.count_N * keep_N)
    if plan.seed is not None:
        batch = batch.with_extra(lot=lots(plan.seed, batch.spread(torch.tensor(members, dtype=torch.int64)), batch.position_T))
    batch = spread(batch, members, reward=plan.reward_N)
    given = {"weight": plan.weight_N, "positive_weight": plan.positive_weight_N, "value_weight": plan.value_weight_N}
    weights = {name: weight_N for name, weight_N in given.items() if weight_N is not None}
    weighted = spread(batch, members, **weights)
    batch = batch.with_extra(**{name: torch.where(batch.mask_T, weighted.extra_T[name], 0.0) for name in weights})
    contexts = [(n, context) for n, sample in zip(members, samples, strict=True) for context in range(1 + len(sample.starts))]
    if len(contexts) == len(chosen):
        return batch
    wanted = set(map(plan.context, chosen))
    held_C = torch.tensor([one in wanted for one in contexts])
    return batch.take(held_C[batch.contexts()[0]].nonzero().squeeze(1))


def after_shown(plan: StepPlan, members: Sequence[int]) -> Batch:
    """Pack responses after what the teacher reads in the place of their prompts; after the prompt where that is None.

    Args:
        plan: the step's plan, with `shown_N`.
        members: the responses, as indices into the N axis.
    """
    assert plan.shown_N is not None

    def after(sample: Sample, shown: np.ndarray | None) -> Sample:
        if shown is None:
            return sample
        tokens, images = np.concatenate([shown, sample.tokens[sample.prompt_length :]]), moved(sample, shown)
        return replace(sample, tokens=tokens, prompt_length=len(shown), images=images)

    return pack([after(sample, plan.shown_N[n]) for n, sample in zip(members, fetch(plan.payload_N, members), strict=True)])


def moved(sample: Sample, prompt: np.ndarray) -> list[PlacedImage]:
    """Return the images of a response's prompt where they stand in another prompt, which has the same in the same order."""
    images = [placed.image for placed in sample.images]
    start_P = np.flatnonzero(prompt == sample.tokens[sample.images[0].start]) if images else np.empty(0, int)
    sizes = [image.tokens for image in images]
    assert len(start_P) == sum(sizes), f"{len(start_P)} tokens of {len(images)} images, which have {sum(sizes)}"
    firsts = np.cumsum([0, *sizes[:-1]])[: len(images)]
    return [PlacedImage(int(start_P[first]), image) for first, image in zip(firsts, images, strict=True)]


def at_response(column_T: Tensor, read: Batch, batch: Batch) -> Tensor:
    """Move numbers from the entries of one batch to those of another, of the same responses after other prompts.

    Args:
        column_T: [T, ...], a number or a row for each entry of `read`.
        read: whole sequences, in order.
        batch: whole sequences: those of `read`, with the same response tokens.

    Returns:
        [T, ...] of `batch`: those of the entry that is scored on the same token, and at entries of the prompt those of the first one.
    """
    first_N = read.length_N.cumsum(0) - read.length_N + read.start_N
    entry_T = batch.spread(first_N) + (batch.position_T - batch.spread(batch.start_N)).clamp(min=0)
    return column_T[entry_T.clamp(max=len(column_T) - 1)]  # a response without tokens has no entry


def lots(seed: int, response_T: Tensor, position_T: Tensor) -> Tensor:
    """Draw a number for each token, SplitMix64's for a counter that is different for every token of a step.

    Args:
        seed: of the step, from 0 to 2^64 - 1.
        response_T: int64 [T], the token's response, as an index into the N axis.
        position_T: int64 [T], its position in it.

    Returns:
        int64 [T], from 0 to 2^62 - 1.
    """
    x_T = (response_T.numpy().astype(np.uint64) << np.uint64(32)) + position_T.numpy().astype(np.uint64)
    x_T = (x_T + np.uint64(seed)) * np.uint64(0x9E3779B97F4A7C15)
    x_T = (x_T ^ (x_T >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x_T = (x_T ^ (x_T >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((x_T ^ (x_T >> np.uint64(31))) >> np.uint64(2)).astype(np.int64))


def turn_rewards(samples: Sequence[Sample]) -> Tensor:
    """The reward of each turn of an episode, at the entry that is scored on the turn's last token; float32 [T], 0 elsewhere."""
    reward_NT = [np.zeros(len(sample.tokens) - 1, np.float32) for sample in samples]
    for sample, reward_T in zip(samples, reward_NT, strict=True):
        for end, reward in sample.turn_rewards:
            reward_T[sample.prompt_length + end - 2] += reward
    entries = [np.delete(reward_T, [start - 1 for start in sample.starts]) for sample, reward_T in zip(samples, reward_NT, strict=True)]
    return torch.from_numpy(np.concatenate([np.empty(0, np.float32), *entries]))


def spread(batch: Batch, members: Sequence[int], **values_N: np.ndarray) -> Batch:
    """Add per-response values to the batch, each at every entry of its response.

    Args:
        batch: one micro-batch.
        members: its responses, as indices into the N axis.
        **values_N: the values of all responses of the step, by the column's name.
    """
    return batch.with_extra(**{name: batch.spread(torch.tensor(value[list(members)])) for name, value in values_N.items()})


def columns(batches: Sequence[Batch], members: Sequence[Sequence[int]], names: Sequence[str]) -> Columns:
    """Put columns of whole micro-batches, split by sample, into the object store.

    Args:
        batches: the micro-batches with every entry of their samples, in order, on the CPU.
        members: the samples of each batch, as indices into the S axis.
        names: the columns' names in `extra_T`.
    """
    stored: Columns = []
    for chosen, batch in zip(members, batches, strict=True):
        ends = np.cumsum(batch.contexts()[1].numpy())[:-1]
        parts = {name: np.split(batch.extra_T[name].numpy(), ends) for name in names}
        stored.append((list(chosen), ray.put([{name: part[index] for name, part in parts.items()} for index in range(len(chosen))])))
    return stored


def with_columns(batches: Sequence[Batch], members: Sequence[Sequence[int]], given: Columns, names: Sequence[str]) -> list[Batch]:
    """Add the columns of another group, which has split the same samples differently. Fetches only the micro-batches it needs.

    Args:
        batches: the micro-batches with every entry of their samples, in order.
        members: the samples of each batch, as indices into the S axis.
        given: what the other group's `columns` returned.
        names: the names of the columns to add.

    Returns:
        The batches with `extra_T[name]`, [T] or [T, ...] as the other group has it, for each name.
    """
    wanted = {n for chosen in members for n in chosen}
    needed = [(chosen, stored) for chosen, stored in given if wanted.intersection(chosen)]
    fetched = ray.get([stored for _, stored in needed])
    columns_of = {n: values for (chosen, _), part in zip(needed, fetched, strict=True) for n, values in zip(chosen, part, strict=True)}

    def joined(chosen: Sequence[int], name: str) -> Tensor:
        return torch.from_numpy(np.concatenate([columns_of[n][name] for n in chosen]) if chosen else np.empty(0, np.float32))

    return [batch.with_extra(**{name: joined(chosen, name) for name in names}) for chosen, batch in zip(members, batches, strict=True)]


def corrections(
    algorithm: PolicyAlgorithm,
    correction: Correction,
    whole: Batch,
    members: Sequence[int],
    mini_batches: Sequence[Sequence[int]],
    part_N: Tensor,
    sum_over: SumOver,
) -> dict[str, Tensor]:
    """Compute the columns that the correction adds on a data-parallel rank. Collective with `normalise` or `denominator: kept`.

    Args:
        algorithm: the run's algorithm.
        correction: the algorithm's correction.
        whole: the responses, with every entry.
        members: the same responses, as indices into the N axis.
        mini_batches: the responses of each mini-batch.
        part_N: bool [N], the responses that take part in the step.
        sum_over: sums over all data-parallel ranks.

    Returns:
        "correction" [T], and, if dropped tokens leave the denominators, "weight" [T], the loss weights of the tokens that remain.
    """
    correction_T = correction.weights(whole, sum_over)
    if correction.denominator == "all":
        return {"correction": correction_T}
    count_N = torch.zeros(len(part_N), dtype=torch.int64)
    count_N[list(members)] = whole.sequence_sum((correction_T > 0).long())
    weight_N = loss_weights(algorithm, sum_over(count_N), mini_batches, part_N)[list(members)].to(correction_T.dtype)
    return {"correction": correction_T, "weight": torch.where(correction_T > 0, whole.spread(weight_N), 0.0)}


def computed_here(batch: Batch) -> Batch:
    """Restrict the batch's loss tokens to those whose log-probs this rank computed."""
    return replace(batch, mask_T=batch.mask_T & ~batch.extra_T["old_logp"].isnan())


def _mean(values: Tensor) -> Metric:
    """The mean of these numbers, to be merged with those of other ranks."""
    return Mean(float(values.sum()), float(len(values)))


def mismatch(batch: Batch) -> dict[str, Metric]:
    """Metrics of how far the engine's log-probs are from the trainer's, over the loss tokens that this rank computed.

    rollout_corr/...: d = old - rollout; kl is the mean of -d, k3_kl the mean of exp(d) - 1 - d, ratio_gt_2 the share of tokens with
    |d| > ln 2, chi2 the mean of exp(2 d) - 1 (with d clamped as in a correction).
    """
    here_T = computed_here(batch).mask_T
    old, rollout = batch.extra_T["old_logp"][here_T].double(), batch.extra_T["rollout_logp"][here_T].double()
    if not len(old):
        return {}
    d, gap = old - rollout, (old.exp() - rollout.exp()).abs()
    bounded = d.clamp(-BOUND, BOUND)
    return {
        "training/rollout_probs_diff_mean": _mean(gap),
        "training/rollout_probs_diff_max": Max(float(gap.max())),
        "training/rollout_probs_diff_std": Std(float(gap.sum()), float(gap.square().sum()), float(len(gap))),
        "training/logprob_gap_mean": _mean(d.abs()),
        "training/logprob_gap_max": Max(float(d.abs().max())),
        "rollout_corr/kl": _mean(-d),
        "rollout_corr/k3_kl": _mean(torch.expm1(d) - d),
        "rollout_corr/ratio_gt_2": _mean((d.abs() > math.log(2)).double()),
        "rollout_corr/rollout_is_mean": _mean(d.exp()),
        "rollout_corr/chi2": _mean(torch.expm1(2 * bounded)),
    }


def mismatch_of_sequences(batch: Batch, sum_over: SumOver | None = None) -> dict[str, Metric]:
    """Metrics of the same gap for whole responses: the trainer's and the engine's perplexity of what the engine sampled.

    ppl of either: mean over responses of exp(-mean_t lp); log_ppl_diff: mean of mean_t(rollout - old); log_ppl_abs_diff: mean of its
    absolute value; ppl_ratio: mean of exp(mean_t(rollout - old)), the trainer's perplexity over the engine's.

    Args:
        batch: the responses; has "old_logp" at every entry. Responses of which a part is in another micro-batch are left out.
        sum_over: sums over the ranks that share the sequences; None: the sequences are whole.
    """
    summed = (torch.ones_like(batch.extra_T["old_logp"]), batch.extra_T["old_logp"], batch.extra_T["rollout_logp"])
    sums_3N = torch.stack([batch.sequence_sum(value_T.double()) for value_T in summed])
    sums_3N = sums_3N if sum_over is None else sum_over(sums_3N)
    here_N = (batch.count_N > 0) & (sums_3N[0] == batch.count_N)
    if not here_N.any():
        return {}
    trainer, engine = (-sums_3N[1:, here_N] / batch.count_N[here_N]).unbind()

    return {
        "rollout_corr/training_ppl": _mean(trainer.exp()),
        "rollout_corr/rollout_ppl": _mean(engine.exp()),
        "rollout_corr/log_ppl_diff": _mean(trainer - engine),
        "rollout_corr/log_ppl_abs_diff": _mean((trainer - engine).abs()),
        "rollout_corr/ppl_ratio": _mean((trainer - engine).exp()),
    }


def teacher_gap(batch: Batch) -> dict[str, Metric]:
    """Metrics of how far the policy is from its teacher, over the loss tokens of whole responses, with d = old - teacher.

    distillation/reverse_kl is the mean of d, an estimate of KL(policy || teacher) per token; k3_kl the mean of exp(-d) - 1 + d, the same
    with less noise; agreement the share of tokens that the teacher finds at least as likely.
    """
    d = (batch.extra_T["old_logp"] - batch.extra_T["teacher_logp"])[batch.mask_T].double()
    if not len(d):
        return {}

    return {
        "distillation/reverse_kl": _mean(d),
        "distillation/k3_kl": _mean(torch.expm1(-d) + d),
        "distillation/agreement": _mean((d <= 0).double()),
    }


def bucket_gap(policy_TB: Tensor, teacher_TB: Tensor, mask_T: Tensor) -> dict[str, Metric]:
    """Metrics of how far the policy is from its teacher, over loss tokens, in the buckets of the teacher's likeliest tokens.

    distillation/reverse_kl is the mean of KL(policy || teacher), forward_kl of KL(teacher || policy); named that of the policy's
    probability of the named tokens.

    Args:
        policy_TB: float [T, B], the policy's log-probs of the buckets.
        teacher_TB: float [T, B], the teacher's.
        mask_T: bool [T], the loss tokens.
    """
    policy_TB, teacher_TB = policy_TB[mask_T].double(), teacher_TB[mask_T].double()
    if not len(policy_TB):
        return {}
    return {
        "distillation/reverse_kl": _mean(divergence(policy_TB, teacher_TB, "reverse_kl")),
        "distillation/forward_kl": _mean(divergence(policy_TB, teacher_TB, "forward_kl")),
        "distillation/named": _mean(-torch.expm1(policy_TB[:, -1])),
    }


def weight_metrics(weight_T: Tensor, batch: Batch) -> dict[str, Metric]:
    """Metrics of the correction's weights at the loss tokens: mean, maximum, share of zeros, and effective sample size.

    weight_ess is the effective sample size (sum w)^2 / sum w^2 over the number of tokens (Kish): 1 if all weights are equal.
    """
    weight = weight_T[batch.mask_T].double()
    if not len(weight):
        return {}
    tokens, total = float(len(weight)), float(weight.sum())
    return {
        "rollout_corr/weight_mean": Mean(total, tokens),
        "rollout_corr/weight_max": Max(float(weight.max())),
        "rollout_corr/weight_zeroed": Mean(float((weight == 0).sum()), tokens),
        "rollout_corr/weight_ess": SampleShare(total, float(weight.square().sum()), tokens),
    }
