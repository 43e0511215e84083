"""The command line: `megarl VERB CONFIG.yaml [a.b=c ...]`. Thin: nothing heavy is imported before a verb is chosen."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl import termination
from megarl.imports import find, uncollected
from megarl.stdout import say
from megarl.text import one_line

FAULT, FAILURE, INTERRUPTED = 2, 1, 130
MOST_SHOWN = 1500  # characters of a line, which may quote what was given


@dataclass(frozen=True)
class Verb:
    """Where a verb lives, as "module:name"; imported when it is called."""

    help: str
    config: str  # class of the configuration
    check: str  # called by --check: refuses what can be refused before a process starts
    run: str


VERBS = {
    "train": Verb("reinforcement learning", "megarl.config:TrainConfig", "megarl.stages.checks:check_train", "megarl.trainer:train"),
    "sft": Verb("supervised training", "megarl.config:SftConfig", "megarl.stages.sft:check_sft", "megarl.stages.sft:sft"),
    "value": Verb(
        "value pretraining", "megarl.config:TrainConfig", "megarl.value_trainer:check_value", "megarl.value_trainer:pretrain_value"
    ),
    "rm": Verb("reward model from preferences", "megarl.config:RmConfig", "megarl.stages.rm:check_rm", "megarl.stages.rm:rm"),
    "dpo": Verb("policy from preferences", "megarl.config:DpoConfig", "megarl.stages.dpo:check_dpo", "megarl.stages.dpo:dpo"),
    "pairs": Verb(
        "preferences from a policy's own responses",
        "megarl.config:PairsConfig",
        "megarl.stages.pairs:check_pairs",
        "megarl.stages.pairs:pairs",
    ),
    "serve": Verb("reward model behind HTTP", "megarl.config:ServeConfig", "megarl.stages.serve:check_serve", "megarl.stages.serve:serve"),
    "eval": Verb("held-out pass rates", "megarl.config:EvalConfig", "megarl.stages.eval:check_eval", "megarl.stages.eval:run_eval"),
}


@dataclass(frozen=True)
class Tool:
    """A verb that takes no configuration: `run` is given its arguments and returns the exit status."""

    help: str
    run: str


TOOLS = {
    "config": Tool("the keys of a verb's configuration: what they take, defaults, meaning (config --help)", "megarl.describe:main"),
    "plan": Tool("what fits: bytes by rank, engines, seconds of a step, nearest layouts (plan --help)", "megarl.plan.main:main"),
    "convert": Tool("Hugging Face directories <-> Megatron checkpoints (convert --help)", "megarl.convert.main:main"),
    "samples": Tool("what the model said in a run (samples --help)", "megarl.observe.show_samples:main"),
    "compare": Tool("runs beside each other: a table and one picture (compare --help)", "megarl.observe.compare:main"),
    "verify": Tool("checkpoints compared with their manifests (DIRECTORY instead of CONFIG.yaml)", "megarl.checkpoints.verify:main"),
}


def parser() -> argparse.ArgumentParser:
    """The command line of the verbs that take a configuration, with help for all."""
    verbs = "\n".join(f"  {name:7} {verb.help}" for name, verb in (VERBS | TOOLS).items())
    top = argparse.ArgumentParser(
        prog="megarl",
        description="Reinforcement learning of large MoE language models.\n\nverbs:\n" + verbs,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("verb", choices=VERBS | TOOLS, metavar="VERB", help=", ".join(VERBS | TOOLS))
    top.add_argument("config", type=Path, metavar="CONFIG.yaml")
    top.add_argument("overrides", nargs="*", metavar="a.b=c", help="a value of the configuration, as YAML")
    top.add_argument("--check", action="store_true", help="refuse what is wrong and stop before any process starts")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one verb.

    Returns 0, 2 for bad input (a line per fault on stderr), 130 when interrupted, 143 or 129 after SIGTERM or SIGHUP, 1 for any other
    failure.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    termination.install()
    if (here := os.getcwd()) not in sys.path:  # the console script's own folder stands there instead, and functions are named by module
        sys.path.insert(0, here)
    try:
        if arguments and arguments[0] in TOOLS:
            return _guarded(lambda: find(TOOLS[arguments[0]].run)(arguments[1:]))
        given = parser().parse_intermixed_args(arguments)
        return _guarded(lambda: _run(VERBS[given.verb], given.config, given.overrides, given.check))
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except termination.Terminated as stop:
        print(f"megarl: stopped by {stop.message}", file=sys.stderr)
        return int(stop.code or 0)


def _run(verb: Verb, path: Path, overrides: list[str], check: bool) -> int:
    with uncollected():
        from megarl.config import load
    root: Any = find(verb.config)
    config = load(path, overrides, root)
    with uncollected():
        work = find(verb.check if check else verb.run)
    work(config)
    if check:
        say(f"megarl: {path} passes every check")
    return 0


def _guarded(call: Callable[[], int]) -> int:
    """The exit status of call(), or of what it raised."""
    from megarl.errors import ConfigError, Stopped

    try:
        return call()
    except ConfigError as error:
        for line in str(error).splitlines():
            print(f"megarl: error: {line:.{MOST_SHOWN}}", file=sys.stderr)
        return FAULT
    except Exception as error:
        if not isinstance(error, Stopped):
            traceback.print_exc()
        print(f"megarl: failed: {type(error).__name__}: {one_line(str(error))}", file=sys.stderr)
        return FAILURE


if __name__ == "__main__":
    sys.exit(main())
