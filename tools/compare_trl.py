"""Hold `algorithm.as: trl` against TRL's own trainers: the loss and its gradient by every log-prob, from the same rows in float64.

    python -m pip install trl accelerate datasets      # in an environment of its own; TRL 1.16.0 was compared
    python tools/compare_trl.py

TRL's `_compute_loss` runs as it stands, on a trainer that is given what it reads; the log-probs, which it would ask of a model, are given.
Exit status: 1 if a row of the table of megarl/algorithms/as_another_system.md differs.
"""

import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from megarl.algorithms import peers  # noqa: E402
from tests.unit.algorithms import test_peers as theirs  # noqa: E402
from tests.unit.algorithms.cases import same, weighted  # noqa: E402

BOUND = 1e-8  # of a loss and, against its largest entry, of a gradient
ROUNDED = {"sapo": 1e-5}  # TRL has its temperatures in float32
KL = {"kl_coef": 0.3}
NO_KL = ("gspo", "luspo", "rloo")  # TRL weights the KL of the first two by the sequence's ratio; that of RLOO is in the reward
# Of each type, what TRL is told; everything else is its default.
TOLD: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo"},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "gdpo": {"loss_type": "dapo"},
    "deepseek_v32": {"loss_type": "grpo", "off_policy_mask_threshold": 0.5, "use_bias_correction_kl": True},
    "rloo": {},
}


def trl_loss(kind: str, rows: theirs.Rows, lp: Tensor, advantage: Tensor) -> Tensor:
    """The loss of TRL's trainer."""
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # type: ignore[import-not-found,unused-ignore]

    trainer: Any = RLOOTrainer if kind == "rloo" else GRPOTrainer
    args: Any = (RLOOConfig if kind == "rloo" else GRPOConfig)(
        output_dir="/nowhere", use_cpu=True, bf16=False, max_completion_length=theirs.HORIZON, report_to=[], **TOLD[kind]
    )
    beta = 0.0 if kind in NO_KL else KL["kl_coef"]
    accelerator = SimpleNamespace(
        gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, reduction: x, num_processes=1, sync_gradients=True
    )
    given = SimpleNamespace(
        args=args,
        accelerator=accelerator,
        beta=beta,
        epsilon_low=args.epsilon,
        epsilon_high=args.epsilon if args.epsilon_high is None else args.epsilon_high,
        current_gradient_accumulation_steps=1,
        max_completion_length=theirs.HORIZON,
        aux_loss_enabled=False,
        model=SimpleNamespace(training=False),
        use_vllm=True,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (lp, torch.zeros_like(lp), None),
    )
    for name in ("loss_type", "importance_sampling_level", "off_policy_mask_threshold", "top_entropy_quantile"):
        setattr(given, name, getattr(args, name, None))
    given.vllm_importance_sampling_correction = getattr(args, "vllm_importance_sampling_correction", False)
    for name in ("get_off_policy_mask", "get_gamma_weights"):
        setattr(given, name, getattr(trainer, name, None))
    gap = ((rows.old - rows.roll) * rows.mask).sum(1, keepdim=True).exp()
    ids = torch.zeros(rows.mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": rows.mask,
        "advantages": advantage[:, 0],
        "old_per_token_logps": rows.old,
        "old_logps": (rows.old * rows.mask).sum(1),
        "ref_per_token_logps": rows.ref,
        "sampling_per_token_logps": rows.roll,
        "importance_sampling_ratio": gap.masked_fill(gap > args.vllm_importance_sampling_clip_max, 0.0) if kind != "rloo" else None,
        "num_items_in_batch": rows.mask.sum(),
    }
    loss: Tensor = trainer._compute_loss(given, None, inputs)
    return loss


def compare(kind: str) -> tuple[float, float]:
    """How far apart loss and gradient are, relative to their size."""
    rows = theirs.rows()
    batch = theirs.as_batch(rows)
    algorithm = theirs.settings("trl", kind, **({} if kind in NO_KL else KL))
    advantage_T = theirs.advantages(algorithm, rows, batch)
    batch = weighted(algorithm, batch.with_extra(advantage=advantage_T, reward=batch.spread(rows.reward)))
    # One number per row; 0 for the row without tokens, which TRL's RLOO counts as a constant.
    advantage = rows.mean(theirs.padded(advantage_T, batch))[:, None].expand(rows.mask.shape)
    x_T, x = batch.extra_T["lp"].clone().requires_grad_(), rows.lp.clone().requires_grad_()
    own_loss = (algorithm.loss(x_T, torch.zeros_like(x_T), batch, same, algorithm.kl_coef).loss_T * batch.extra_T["weight"]).sum()
    trl = trl_loss(kind, replace(rows, lp=x), x, advantage)
    own_loss.backward()
    trl.backward()
    assert x_T.grad is not None and x.grad is not None
    gap = (theirs.padded(x_T.grad, batch) - x.grad).abs().max() / x.grad.abs().max()
    return abs(float(own_loss.detach()) / float(trl.detach()) - 1), float(gap)


def main() -> int:
    apart = []
    for kind in peers.SETTINGS["trl"]:
        value, slope = compare(kind)
        apart += [kind] if max(value, slope) > ROUNDED.get(kind, BOUND) else []
        print(f"{kind:14s} loss apart by {value:.1e}, gradient by {slope:.1e}{'  DIFFERENT' if kind in apart else ''}")
    return 1 if apart else 0


if __name__ == "__main__":
    sys.exit(main())
