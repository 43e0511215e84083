"""The table of verbs. It imports none of their code, so that `megarl --help` comes at once."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Verb:
    """A verb that takes a configuration. Code is named as "module:name", and imported when the verb is called."""

    help: str
    leaves: str  # what it writes to runs/<name>/
    config: str  # class of the configuration
    check: str  # called by --check: raises whatever can be detected before a process starts
    run: str


NUMBERS = "metrics.jsonl, samples/, summary.json, report.html"
VERBS = {
    "train": Verb(
        "reinforcement learning",
        f"model/, critic/, {NUMBERS}",
        "megarl.config:TrainConfig",
        "megarl.checks.train:check_train",
        "megarl.loops.train:train",
    ),
    "sft": Verb(
        "supervised training",
        f"model/, {NUMBERS}",
        "megarl.config:SftConfig",
        "megarl.checks.without_engines:check_sft",
        "megarl.loops.sft:sft",
    ),
    "value": Verb(
        "value pretraining",
        f"critic/, {NUMBERS}",
        "megarl.config:ValueConfig",
        "megarl.checks.train:check_value",
        "megarl.loops.value:pretrain_value",
    ),
    "rm": Verb(
        "reward model from preferences",
        f"model/, {NUMBERS}",
        "megarl.config:RmConfig",
        "megarl.checks.without_engines:check_rm",
        "megarl.loops.rm:rm",
    ),
    "dpo": Verb(
        "policy from preferences",
        f"model/, {NUMBERS}",
        "megarl.config:DpoConfig",
        "megarl.checks.without_engines:check_dpo",
        "megarl.loops.dpo:dpo",
    ),
    "pairs": Verb(
        "preferences from a policy's own responses",
        "train.jsonl, eval.jsonl",
        "megarl.config:PairsConfig",
        "megarl.checks.without_ranks:check_pairs",
        "megarl.loops.pairs:pairs",
    ),
    "serve": Verb(
        "reward model served over HTTP",
        "nothing",
        "megarl.config:ServeConfig",
        "megarl.checks.without_engines:check_serve",
        "megarl.loops.serve:serve",
    ),
    "eval": Verb(
        "avg@n and pass@k on held-out sets",
        "eval.json, samples/",
        "megarl.config:EvalConfig",
        "megarl.checks.without_ranks:check_eval",
        "megarl.loops.evaluate:run_eval",
    ),
}


@dataclass(frozen=True)
class Tool:
    """A verb that takes no configuration: `run` takes the verb's arguments and returns the exit status."""

    help: str
    run: str
    reads: bool = True  # its system errors are about files that its arguments name


TOOLS = {
    "config": Tool("the keys of a verb's configuration: accepted values, defaults, meaning (config --help)", "megarl.cli.describe:main"),
    "data": Tool("what a run reads and learns of its data (data --help)", "megarl.loops.show_data:main"),
    "init": Tool("a commented configuration for your own model and data (init --help)", "megarl.cli.init:main"),
    "generate": Tool("ask a model: one prompt, a file of prompts, or a chat (generate --help)", "megarl.loops.generate:main", reads=False),
    "plan": Tool("what fits: bytes per rank, engines, seconds per step, nearest layouts (plan --help)", "megarl.plan.main:main"),
    "slurm": Tool("a run as a Slurm job that saves, requeues itself and resumes; status (slurm --help)", "megarl.slurm.main:main"),
    "convert": Tool("Hugging Face directories <-> Megatron checkpoints (convert --help)", "megarl.convert.main:main"),
    "samples": Tool("what the model said in a run (samples --help)", "megarl.observe.show_samples:main"),
    "compare": Tool("runs side by side: a table and one picture (compare --help)", "megarl.observe.compare:main"),
    "verify": Tool("check checkpoints against their manifests (DIRECTORY instead of CONFIG.yaml)", "megarl.checkpoints.verify:main"),
}
