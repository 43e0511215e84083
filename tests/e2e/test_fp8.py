"""A run whose engines hold fp8 weights: rank 0 quantises what two ranks export, and the log-prob gap is measured at every step."""

from pathlib import Path

from tests.e2e.job import Job
from tests.e2e.lab import Lab
from tools.make_tiny_model import build


def test_a_run_learns_from_fp8_engines(lab: Lab, tmp_path: Path) -> None:
    build(tmp_path / "model", layers=2, hidden=256, experts=4, expert_hidden=128, seed=1)
    fp8 = ("rollout.quantization=fp8", "algorithm.correction={type: tis}")
    job = lab.run(Job(tmp_path, tmp_path / "model", ("train.steps=2", *fp8, "layout={ranks: 2, tp: 2, ep: 2}")))
    steps = job.steps()
    assert len(steps) == 2
    for row in steps:
        assert 1e-3 <= row["training/logprob_gap_mean"] <= 0.5, "the quantisation's, which float32 engines do not have"
        assert row["rollout_corr/ratio_gt_2"] >= 0 and row["actor/grad_norm"] > 0
    whole = 4 * sum(weight_sizes(tmp_path / "model")) / 2**20
    assert whole / 4 < steps[0]["sync/mb"] < whole / 3


def weight_sizes(model: Path) -> list[int]:
    """The numbers of elements of a directory's tensors."""
    from safetensors.torch import load_file

    return [tensor.numel() for tensor in load_file(model / "model.safetensors").values()]
