"""On-policy distillation: its formula, its gradient, and the losses that it does not go with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.distillation import Distillation
from megarl.batch import Batch, Sample, pack
from megarl.config import TrainConfig

PROMPT = 2
SETS = (("train", 1), ("eval", 2))


def batch_of(*masks: tuple[bool, ...]) -> Batch:
    """Two-token prompts, and a response of each mask's length of which it marks the loss tokens."""
    samples = []
    for mask in masks:
        tokens = np.arange(PROMPT + len(mask), dtype=np.int32)
        samples.append(Sample(tokens, PROMPT, np.zeros(len(mask), np.float32), "stop", loss_mask=np.array(mask)))
    return pack(samples)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_a_token_answers_for_its_own_gap_and_discounted_for_the_later_ones(gamma: float) -> None:
    batch = batch_of((True, True, False, True), (True,))
    torch.manual_seed(0)
    old_T, teacher_T, task_T = (torch.randn(len(batch), dtype=torch.float64) for _ in range(3))
    masked = ~batch.mask_T
    columns = {"old_logp": old_T.masked_fill(masked, torch.nan), "teacher_logp": teacher_T.masked_fill(masked, torch.nan)}
    given = batch.with_extra(**columns)
    settings = Distillation(coef=0.7, gamma=gamma, task_weight=0.3)
    advantage_T = settings.advantages(task_T.masked_fill(masked, torch.nan), given)
    for sequence in range(2):
        entries = [t for t in range(len(batch)) if batch.seq_T[t] == sequence and batch.mask_T[t]]
        for number, t in enumerate(entries):
            later = sum(gamma**k * float(old_T[u] - teacher_T[u]) for k, u in enumerate(entries[number:]))
            assert float(advantage_T[t]) == pytest.approx(0.3 * float(task_T[t]) - 0.7 * later, abs=1e-12)
    assert (advantage_T[masked] == 0).all()


def test_its_expected_gradient_is_that_of_the_reverse_kl() -> None:
    torch.manual_seed(1)
    logits_V, teacher_V = torch.randn(2, 7, dtype=torch.float64)
    logits_V.requires_grad_()
    lp_V, teacher_lp_V = logits_V.log_softmax(0), teacher_V.log_softmax(0)
    [kl] = torch.autograd.grad((lp_V.exp() * (lp_V - teacher_lp_V)).sum(), logits_V, retain_graph=True)
    batch = batch_of(*[(True,)] * 7)
    place, zeros_T = batch.mask_T.nonzero().squeeze(1), torch.zeros(len(batch), dtype=torch.float64)
    given = {"old_logp": lp_V.detach(), "teacher_logp": teacher_lp_V}
    columns = {name: zeros_T.index_copy(0, place, value) for name, value in given.items()}
    advantage_V = Distillation().advantages(zeros_T, batch.with_extra(**columns))[place]
    [policy] = torch.autograd.grad(-(lp_V.exp().detach() * advantage_V * lp_V).sum(), logits_V)
    torch.testing.assert_close(policy, kl, rtol=1e-12, atol=1e-12)


def config(algorithm: dict[str, object], **more: object) -> TrainConfig:
    return TrainConfig.model_validate(
        {
            "name": "x",
            "model": {"path": "m"},
            "algorithm": algorithm,
            "data": {name: {"type": "reasoning_gym", "dataset": "spell_backward", "seed": seed, "items": 8} for name, seed in SETS},
            "reward": {"source": {"type": "reasoning_gym"}},
            "train": {"steps": 1, "prompts_per_step": 8},
            "distillation": {"teacher": "t"},
            **more,
        }
    )


@pytest.mark.parametrize("name", ["gspo", "gmpo", "raft"])
def test_a_loss_without_an_advantage_for_each_token_is_refused(name: str) -> None:
    with pytest.raises(
        ValueError, match=rf"distillation: gives each token an advantage of its own, but the loss of algorithm\.type={name} "
    ):
        config({"type": name})


def test_the_old_log_probs_are_computed_before_the_only_update() -> None:
    assert config({"type": "reinforce"}).old_logp == "forward"
    assert config({"type": "reinforce"}, distillation=None).old_logp == "update"


def test_ranks_for_a_teacher_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"placement\.teacher: there is no section distillation; leave this out"):
        config({"type": "reinforce"}, distillation=None, placement={"teacher": {"ranks": 2, "tp": 2}})
