"""On-policy distillation: its formula, its gradient, and the losses that it does not go with."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algorithms.distillation import Distillation, Divergence, divergence
from megarl.algorithms.sft import Sft, StoredDistillation
from megarl.batch import Batch, Sample, pack
from megarl.checks.data import LOOKED
from megarl.checks.other_models import check_taught
from megarl.config import ConfigError, DistillationSettings, TrainConfig
from megarl.data.prompts import Prompt
from megarl.ranks.step_plan import Group, teachers
from megarl.response import Response
from megarl.rewards.score import Score

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


def test_feedback_needs_a_verifier_that_says_something() -> None:
    """As a function does, alone or in a sum."""
    teaching, gym = {"prompt": "{prompt}: {feedback}"}, {"type": "reasoning_gym"}
    silent = {"type": "sum", "parts": [{"name": "right", "source": gym}]}
    telling = {"type": "sum", "parts": [*silent["parts"], {"name": "own", "source": {"type": "function", "path": "a:b"}}]}
    for source in (gym, silent):
        with pytest.raises(ValueError, match=rf"prompt: \{{feedback\}} is .* and reward\.source\.type={source['type']} says nothing"):
            config({"type": "reinforce"}, distillation=teaching, reward={"source": source})
    config({"type": "reinforce"}, distillation=teaching, reward={"source": telling})


@pytest.mark.parametrize("given", [{}, {"teacher": "t", "teachers": {"a": "u"}}])
def test_one_teacher_or_one_for_each_source_is_needed(given: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="teacher: give one teacher, or teachers, one for each data source"):
        config({"type": "reinforce"}, distillation=given)


def prompt(number: int, **meta: str) -> Prompt:
    return Prompt(number, "", [1], "", meta, place=f"train.jsonl:{number + 1}")


def test_each_source_has_its_teacher_and_each_teacher_a_prompt() -> None:
    settings = DistillationSettings(teachers={"a": Path("t"), "b": Path("u"), "c": Path("t")})
    assert settings.models == {"teachers.a": Path("t"), "teachers.b": Path("u")}, "a model of two sources is there once"
    prompts = [prompt(n, data_source=source) for n, source in enumerate("abca")] + [prompt(4, source_dataset="b")]
    assert [settings.taught_by(one.meta, one.name) for one in prompts] == [0, 1, 0, 0, 1]
    check_taught(settings, prompts)
    check_taught(DistillationSettings(teacher=Path("t")), [prompt(0)])
    check_taught(None, [prompt(0)])
    known = "there are teachers for 'a', 'b', 'c'"
    with pytest.raises(ConfigError, match=rf"^distillation\.teachers: train\.jsonl:6 has data_source='d'; {known}$"):
        check_taught(settings, [*prompts, prompt(5, data_source="d")])
    with pytest.raises(ConfigError, match=rf"^distillation\.teachers: train\.jsonl:1 has no data_source; {known}$"):
        check_taught(settings, [prompt(0)])
    with pytest.raises(ConfigError, match=r"^distillation\.teachers\.b: no prompt of data\.train is of a source that this teacher is for$"):
        check_taught(settings, [prompt(0, data_source="a")])
    many = [prompts[0]] * (2 * LOOKED)
    check_taught(settings, many)  # not all of them were looked at


def test_a_plan_says_which_teacher_scores_each_response() -> None:
    settings = DistillationSettings(teachers={"a": Path("t"), "b": Path("u")})
    response = Response(0, "", 4, 3, 3, True, None, 0)
    groups = [
        Group(0, prompt(0, data_source=source), [response] * size, [Score(1.0)] * size, None) for source, size in (("b", 2), ("a", 3))
    ]
    found = teachers(settings, groups)
    assert found is not None and found.tolist() == [1, 1, 0, 0, 0]
    assert teachers(DistillationSettings(teacher=Path("t")), groups) is None
    groups[0] = Group(0, prompt(0), [response], [Score(1.0)], None)
    with pytest.raises(ConfigError, match="has no data_source"):
        teachers(settings, groups)


def test_the_old_log_probs_are_computed_before_the_only_update() -> None:
    assert config({"type": "reinforce"}).old_logp == "forward"
    assert config({"type": "reinforce"}, distillation=None).old_logp == "update"


def test_ranks_for_a_teacher_that_is_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"placement\.teacher: there is no section distillation; leave this out"):
        config({"type": "reinforce"}, distillation=None, placement={"teacher": {"ranks": 2, "tp": 2}})


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_a_divergence_is_its_sum_over_buckets_and_with_all_tokens_named_that_of_the_vocabulary(kind: Divergence) -> None:
    torch.manual_seed(2)
    policy_TV, teacher_TV = torch.randn(2, 5, 9, dtype=torch.float64).log_softmax(-1)

    def kl(left: list[float], right: list[float]) -> float:
        return sum(p * math.log(p / q) for p, q in zip(left, right, strict=True))

    def expected(p: list[float], q: list[float]) -> float:
        middle = [(one + other) / 2 for one, other in zip(p, q, strict=True)]
        return {"reverse_kl": kl(p, q), "forward_kl": kl(q, p), "jsd": (kl(p, middle) + kl(q, middle)) / 2}[kind]

    bounds = []
    for named in (2, 8):  # of nine, so that with eight the others are one token
        order_TV = teacher_TV.argsort(1, descending=True)
        policy_TB, teacher_TB = (
            torch.cat([one.gather(1, order_TV[:, :named]), one.gather(1, order_TV[:, named:]).logsumexp(1, keepdim=True)], 1)
            for one in (policy_TV, teacher_TV)
        )
        value_T = divergence(policy_TB, teacher_TB, kind)
        for t in range(5):
            assert float(value_T[t]) == pytest.approx(expected(policy_TB[t].exp().tolist(), teacher_TB[t].exp().tolist()), rel=1e-12)
        bounds.append(value_T)
    whole = [expected(policy_TV[t].exp().tolist(), teacher_TV[t].exp().tolist()) for t in range(5)]
    assert bounds[1].tolist() == pytest.approx(whole, rel=1e-12) and bool((bounds[0] <= bounds[1] + 1e-12).all())
    equal_TB = policy_TB.clone().requires_grad_()
    [slope_TB] = torch.autograd.grad(divergence(equal_TB, policy_TB, kind).sum(), equal_TB)
    along_TB = slope_TB - equal_TB.detach().exp() * slope_TB.sum(1, keepdim=True)  # as the logits see it
    assert float(along_TB.abs().max()) < 1e-15, "the teacher is a stationary point"


def test_the_term_of_the_loss_is_0_at_masked_tokens_and_the_task_keeps_its_advantage() -> None:
    batch = batch_of((True, False, True))
    policy_TB, teacher_TB = torch.randn(2, len(batch), 4, dtype=torch.float64).log_softmax(-1)
    policy_TB.requires_grad_()
    settings = Distillation(top_k=3, coef=0.7, task_weight=0.3)
    loss_T = settings.loss(policy_TB, teacher_TB, batch.mask_T)
    torch.testing.assert_close(
        loss_T, torch.where(batch.mask_T, 0.7 * (policy_TB.exp() * (policy_TB - teacher_TB)).sum(1), 0.0), rtol=1e-12, atol=1e-15
    )
    [slope_TB] = torch.autograd.grad(loss_T.sum(), policy_TB)
    assert (slope_TB[~batch.mask_T] == 0).all() and (slope_TB[batch.mask_T] != 0).all()
    task_T = torch.randn(len(batch), dtype=torch.float64)
    assert torch.equal(settings.advantages(task_T, batch), torch.where(batch.mask_T, 0.3 * task_T, 0.0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"divergence": "jsd"}, r"divergence=jsd: needs top_k"),
        ({"top_k": 8, "gamma": 0.5}, r"gamma=0\.5: .* top_k=8 makes none"),
        ({"top_k": 0}, r"distillation\.top_k"),
    ],
)
def test_what_a_form_would_not_use_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config({"type": "reinforce"}, distillation={"teacher": "t", **given})


def test_named_tokens_go_with_any_loss_of_advantages_and_without_a_pass_before_the_only_update() -> None:
    for name in ("gspo", "gmpo"):
        config({"type": name}, distillation={"teacher": "t", "top_k": 8})
    with pytest.raises(ValueError, match=r"algorithm\.type=raft reads none"):
        config({"type": "raft"}, distillation={"teacher": "t", "top_k": 8})
    assert config({"type": "reinforce"}, distillation={"teacher": "t", "top_k": 8}).old_logp == "update"


@pytest.mark.parametrize("kind", ["reverse_kl", "forward_kl", "jsd"])
def test_the_loss_on_stored_log_probs_is_the_divergence_over_the_vocabulary(kind: Divergence) -> None:
    """With all tokens named but two: then the others' bucket is the two together. Value and gradient, with the response's likelihood."""
    torch.manual_seed(3)
    batch, vocabulary, named = batch_of((True, False, True), (True,)), 7, 5
    x_TV = torch.randn(len(batch), vocabulary, dtype=torch.float64, requires_grad=True)
    teacher_TV = torch.randn(len(batch), vocabulary, dtype=torch.float64).log_softmax(1)
    order_TV = teacher_TV.argsort(1, descending=True)

    def buckets(lp_TV: Tensor) -> Tensor:
        return torch.cat([lp_TV.gather(1, order_TV[:, :named]), lp_TV.gather(1, order_TV[:, named:]).logsumexp(1, keepdim=True)], 1)

    lp_TV = x_TV.log_softmax(1)
    lp_T = lp_TV.gather(1, batch.target_T[:, None] % vocabulary).squeeze(1)
    given = batch.with_extra(entropy=lp_T.detach(), policy_buckets=buckets(lp_TV), teacher_buckets=buckets(teacher_TV))
    objective = Sft(distillation=StoredDistillation(divergence=kind, coef=2.0, nll_weight=0.5))
    loss = objective.loss(lp_T, given, lambda value: value)
    [slope_TV] = torch.autograd.grad(loss.loss_T.sum(), x_TV, retain_graph=True)

    p_TB, q_TB = buckets(lp_TV).exp(), buckets(teacher_TV).exp()
    m_TB = (p_TB + q_TB) / 2
    by_hand = {
        "reverse_kl": (p_TB * (p_TB / q_TB).log()).sum(1),
        "forward_kl": (q_TB * (q_TB / p_TB).log()).sum(1),
        "jsd": 0.5 * ((p_TB * (p_TB / m_TB).log()).sum(1) + (q_TB * (q_TB / m_TB).log()).sum(1)),
    }[kind]
    expected_T = torch.where(batch.mask_T, 2 * by_hand - 0.5 * lp_T, 0.0)
    [expected_TV] = torch.autograd.grad(expected_T.sum(), x_TV)
    torch.testing.assert_close(loss.loss_T, expected_T, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(slope_TV, expected_TV, rtol=1e-10, atol=1e-12)
    shown = {name: float(one.total / one.weight) for name, one in loss.mean.items()}
    assert shown["sft/loss"] == pytest.approx(2 * shown["sft/divergence"] + 0.5 * shown["sft/nll"])
