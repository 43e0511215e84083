"""megarl from a script or a notebook."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import megarl
from megarl.config import ConfigError, EvalConfig, TrainConfig, load
from megarl.imports import find
from megarl.verbs import VERBS
from tests.unit.examples.test_configurations import EXAMPLES

DAPO = EXAMPLES / "recipes" / "dapo.yaml"
FUNCTIONS = {"eval": megarl.evaluate} | {verb: getattr(megarl, verb) for verb in VERBS if verb != "eval"}
CONFIGURATIONS = {
    **{"train": DAPO, "sft": EXAMPLES / "quickstart" / "sft.yaml", "eval": EXAMPLES / "quickstart" / "eval.yaml"},
    **{verb: EXAMPLES / "rlhf" / f"{verb}.yaml" for verb in ("rm", "dpo", "pairs", "serve")},
}


def test_a_configuration_is_loaded_as_by_the_command_line() -> None:
    assert megarl.load_config(DAPO, "train.steps=5", "seed=3") == load(DAPO, ["train.steps=5", "seed=3"], TrainConfig)
    assert megarl.load_config(str(DAPO)).train.steps == 20
    assert isinstance(megarl.load_config(CONFIGURATIONS["eval"], verb="eval"), EvalConfig)
    with pytest.raises(ConfigError, match=r"^train\.step: unknown key \(did you mean 'steps'\?\)$"):
        megarl.load_config(DAPO, "train.step=5")
    with pytest.raises(ValueError, match=r"^verb: 'evaluate' is none of train, sft, "):
        megarl.load_config(DAPO, verb="evaluate")


@pytest.mark.parametrize("verb", CONFIGURATIONS)
def test_a_verb_is_a_function_that_returns_its_result(verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def run(config: Any) -> None:
        seen.append(config)
        config.directory.mkdir(parents=True)
        (config.directory / "summary.json").write_text('{"rl_steps": 2}')
        rows = (
            '{"step": 1, "reward/mean": 0.5, "perf/time_per_step": 2.0}\n{"step": 1, "eval/heldout/avg@1": 0.25}\n'  # as `Run` writes them
        )
        (config.directory / "metrics.jsonl").write_text(rows)

    module, _, name = VERBS[verb].run.partition(":")
    find(VERBS[verb].run)
    monkeypatch.setattr(sys.modules[module], name, run)
    config = megarl.load_config(CONFIGURATIONS[verb], f"run_dir={tmp_path}", verb=verb)
    result = FUNCTIONS[verb](config)
    assert seen == [config]
    if verb != "serve":
        assert result.directory == config.directory and result.summary == {"rl_steps": 2}
        assert [row["step"] for row in result.metrics] == [1, 1] and result.metrics[0]["reward/mean"] == 0.5
        assert result.steps == result.metrics[:1]


def test_a_configuration_of_another_verb_is_refused() -> None:
    with pytest.raises(ValueError, match=r'^sft: the configuration is a TrainConfig, not a SftConfig: load_config\(\.\.\., verb="sft"\)$'):
        megarl.sft(megarl.load_config(DAPO))


def test_importing_megarl_imports_nothing_heavy() -> None:
    code = "import sys, megarl; print(sorted({'torch', 'ray', 'pydantic', 'megarl.config'} & set(sys.modules)))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=Path(megarl.__file__).parents[1], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("path", ["''", "'/nonexistent'"])
def test_a_module_of_the_current_folder_is_found(path: str, tmp_path: Path) -> None:
    """A notebook and `python -` have an empty name on Python's path, and a script its own folder; the processes that score have neither."""
    (tmp_path / "own_reward.py").write_text("def score(response, answer):\n    return 1.0\n")
    program = f"""
        import os, sys
        sys.path[:] = [{path}, *sys.path[1:], {str(Path(megarl.__file__).parents[1])!r}]
        from megarl.imports import add_current_folder, find
        from megarl.sandbox.process import importable
        add_current_folder()
        print(find("own_reward:score")("1", "1"), os.getcwd() in importable())
    """
    shown = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, capture_output=True, text=True)
    assert shown.stdout == "1.0 True\n", shown.stderr


def test_a_folder_on_the_path_that_is_not_installed_knows_its_version() -> None:
    code = """
        import importlib.metadata as metadata
        from_name = metadata.Distribution.from_name

        def without(name):
            if name == "megarl":
                raise metadata.PackageNotFoundError(name)
            return from_name(name)

        metadata.Distribution.from_name = without
        from megarl.checkpoints import steps
        from megarl.observe import summary
        print(steps.versions()["megarl"], summary.versions()["megarl"])
        from megarl.cli import main
        main(["--version"])
    """
    root, program = Path(megarl.__file__).parents[1], textwrap.dedent(code)
    shown = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    number = megarl.__version__
    assert shown.stdout.splitlines() == [f"{number} {number}", f"megarl {number}"], shown.stderr
