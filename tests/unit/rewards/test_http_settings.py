"""The settings of a reward server, as a configuration is loaded."""

from pathlib import Path

import pytest

from megarl.config import ConfigError, TrainConfig, dump, load
from tests.e2e.job import RL


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "'127.0.0.1:8000' is not an http:// or https:// address"),
        ("ftp://host/x", "'ftp://host/x' is not an http:// or https:// address"),
        ("http://", "'http://' is not an http:// or https:// address"),
        ("http://host:port/", "Port could not be cast to integer"),
        ("http://ho st/", "is not an http:// or https:// address"),
        ("http://user:hush@host/", "contains a user or a password; put a token into the environment variable"),
    ],
)
def test_a_malformed_url_is_refused_when_the_configuration_loads(url: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model="nowhere"))
    with pytest.raises(ConfigError, match=rf"^reward\.source\.url: .*{message}") as refused:
        load(tmp_path / "job.yaml", [f"reward.source={{type: http, url: '{url}'}}"], TrainConfig)
    assert "hush" not in str(refused.value) and "\n" not in str(refused.value)


def test_the_settings_load_again_from_what_a_run_keeps(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path, model="nowhere"))
    source = "{type: http, url: 'https://host:8000/score', token_env: TOKEN, attempts: 7}"
    config = load(tmp_path / "job.yaml", [f"reward.source={source}"], TrainConfig)
    (tmp_path / "kept.yaml").write_text(dump(config))
    assert load(tmp_path / "kept.yaml", [], TrainConfig) == config
