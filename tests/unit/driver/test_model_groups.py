"""What the ranks are told of a run."""

from pathlib import Path

from megarl.config import TrainConfig, ValueConfig, load
from megarl.driver.model_groups import rl_spec
from tests.e2e.job import RL


def test_the_critic_s_schedule_ends_with_the_run_that_it_is_trained_in(tmp_path: Path) -> None:
    """`megarl value` never takes train.steps."""
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model=tmp_path))
    own = ["algorithm.type=vapo", "critic={pretrain_steps: 5, epochs: 3}", "train.steps=20", "train.mini_batches=2"]
    for root, steps in ((TrainConfig, 25), (ValueConfig, 5)):
        config = load(tmp_path / "job.yaml", own, root)
        assert (config.total_steps, rl_spec(config, ("policy", "critic")).critic_updates) == (steps, 3 * 2 * steps)
