"""`megarl init MODEL DATA`: a commented configuration for the user's own model and data file, which loads and passes the checks."""

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from megarl.cluster.machine import gpus_here
from megarl.cluster.placement import Node, NoRoom, place
from megarl.cluster.process_kinds import demand
from megarl.config import (
    ConfigError,
    ConversationSource,
    FileSource,
    PreferenceData,
    PreferenceSource,
    RunSettings,
    SftData,
    SourceFormat,
    load,
    yaml_text,
)
from megarl.data.columns import find
from megarl.data.files import read_rows
from megarl.data.messages import TOOLS
from megarl.data.preferences import load_preferences
from megarl.data.sources import load_prompts
from megarl.data.supervised import load_conversations
from megarl.data.tokenizer import load_tokenizer
from megarl.host.unchecked import naming_unchecked
from megarl.imports import find as imported
from megarl.models.families import check_checkpoint
from megarl.models.hf import has_weights, inventory
from megarl.plan.devices import DEVICES, GB, MEMORY_GB, Device, device_of
from megarl.plan.main import MAX_NUMBER
from megarl.plan.parameters import model_elements
from megarl.plan.search import nearest, search
from megarl.plan.whole import models_of
from megarl.text.display import one_line
from megarl.text.stdout import say
from megarl.verbs import VERBS

LOOKED_AT = 100  # rows that are read to find the columns
PROMPTS = ("prompt", "question", "problem", "query", "instruction", "input")
ANSWERS = ("reward_model.ground_truth", "answer", "solution", "ground_truth", "final_answer", "label", "target")
CONVERSATIONS = ("messages", "conversation", "conversations")
HELD_OUT, STEP = 256, 16  # most held-out rows; lengths are multiples of STEP
INTERFACE = "eth0"  # a guess: only the nodes know the name of their network
LARGE = 6.5e9  # parameters from which on recomputation is proposed even if activations would fit
ROOM = 1.25  # leaves room for prompts longer than those in the file
REWARD = "my_reward"  # the module of the reward function that the user writes
STUB = '''"""Your reward function, written by `megarl init`: replace this comparison with what a response is worth."""


def score(response: str, answer: str) -> float:
    """1 for the answer and nothing else."""
    return float(response.strip() == str(answer).strip())
'''
EXPRESSION = re.compile(r"[\d\s.,+\-*/^=%()\[\]{}$\\a-zA-Z_]{1,40}")
Tree = dict[str, Any]


@dataclass(frozen=True)
class DataColumns:
    """The columns that were found in a file, and the verb that learns from them."""

    verb: str
    prompt: str = ""  # the column of the prompt, or of the conversation
    answer: str = ""
    mathematical: bool = False  # whether the answers are short expressions
    tools: bool = False  # whether rows have schemas of tools


def main(arguments: Sequence[str]) -> int:
    """Write the configuration. Raises ConfigError if the model or the data cannot be used."""
    top = argparse.ArgumentParser(
        prog="megarl init",
        description="Writes a configuration for your own model and data: finds the columns, measures lengths, chooses a layout that fits.",
    )
    top.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face directory")
    top.add_argument("data", type=Path, metavar="DATA", help="a .jsonl or .parquet file, or a directory of `datasets`")
    where = top.add_mutually_exclusive_group()
    where.add_argument("--cpu", action="store_true", help="run on the CPU (for a small model)")
    where.add_argument("--gpus", type=int, default=8, metavar="N", help="number of GPUs (8)")
    top.add_argument("--device", choices=DEVICES, help="their type (default: by memory)")
    top.add_argument("--gpu-gb", type=float, metavar="M", help="memory of each in GB (default: that of --device, or 80)")
    top.add_argument("--gpus-per-node", type=int, metavar="N", help="GPUs of a node (default: 8, or 4 of a GB200)")
    top.add_argument(
        "--out", type=Path, default=Path("own.yaml"), metavar="FILE", help="the configuration to write (own.yaml); must not exist"
    )
    given = top.parse_args(list(arguments))
    if given.out.exists():
        raise ConfigError(f"init: {given.out} already exists; name another file with --out")
    if not given.out.absolute().parent.is_dir():
        raise ConfigError(f"init: --out {given.out}: its directory does not exist")
    if not given.cpu and not 0 < given.gpus <= 1024:
        raise ConfigError(f"init: --gpus {given.gpus} is not between 1 and 1024")
    if given.gpu_gb is None:
        given.gpu_gb = float(DEVICES[given.device].memory_gb) if given.device else MEMORY_GB
    if not 0 < given.gpu_gb <= MAX_NUMBER:
        raise ConfigError(f"init: --gpu-gb {given.gpu_gb}: must be above 0, and {MAX_NUMBER:,} at most")
    if given.gpus_per_node is not None and not 0 < given.gpus_per_node <= 1024:
        raise ConfigError(f"init: --gpus-per-node {given.gpus_per_node} is not between 1 and 1024")
    for name, path in (("MODEL", given.model), ("DATA", given.data), ("--out", given.out)):
        if not str(path).isprintable():
            raise ConfigError(f"init: {name} {str(path)!r:.300} is not printable text on one line")
    columns = columns_of(given.data)
    with naming_unchecked():
        tree, notes = proposed(given.model, given.data, columns, given.cpu, given.gpus)
    root: Any = imported(VERBS[columns.verb].config)
    try:
        given.out.write_text(text(tree, notes, columns.verb, given))
        if not given.cpu:
            notes["layout"] = _lay_out(tree, load(given.out, [], root), given)
            given.out.write_text(text(tree, notes, columns.verb, given))
        config = load(given.out, [], root)
        following = _following(columns.verb, given, config)
    except BaseException:
        given.out.unlink(missing_ok=True)
        raise
    say(f"megarl: wrote {given.out}")
    if columns.verb == "train" and not columns.mathematical:
        say(_reward_file(Path(f"{REWARD}.py")))
    if "interface" in tree["cluster"]:
        say(f"megarl: cluster.interface={INTERFACE} is a guess: give the name of the nodes' network, which `ip -br address` lists there")
    say(f"next:   {following}")
    return 0


def _following(verb: str, given: argparse.Namespace, config: RunSettings) -> str:
    """The command that checks the written configuration and is not refused on this machine: as a run here, or as a Slurm job.

    Args:
        verb: the verb that the configuration is for.
        given: the arguments of the command line.
        config: the configuration.
    """
    file = shlex.quote(f"./{given.out}" if str(given.out).startswith("-") else str(given.out))
    which, gpus = f" --verb {verb}" * (verb != "train"), _gpus(config)
    if has_weights(config.model.path) and gpus <= min(gpus_here(), _device(given).node):
        return f"megarl {verb} {file} --check"
    if given.cpu:
        return f"megarl plan {file}{which}"
    per_node = _per_node(config, _device(given).node)
    return f"megarl slurm {file}{which} --nodes {gpus // per_node} --gpus-per-node {per_node} --dry-run"


def _gpus(config: RunSettings) -> int:
    return sum(kind.gpus * kind.processes for kind in demand(config))


def _per_node(config: RunSettings, most: int) -> int:
    """The largest number of GPUs per node, at most `most`, with which equal nodes hold the run and all of their GPUs work."""
    kinds, gpus = demand(config), _gpus(config)
    for per_node in range(min(most, gpus), 0, -1):
        if gpus % per_node == 0:
            try:
                place(kinds, [Node(f"node {n}", sys.maxsize, per_node) for n in range(gpus // per_node)])
            except NoRoom:
                continue
            return per_node
    raise ConfigError(f"init: --gpus {gpus}: no equal nodes of at most {most} GPUs hold what the layout puts on one node")


def _device(given: argparse.Namespace) -> Device:
    """The GPU that the command line names, or the one with as much memory, in its nodes."""
    return device_of(given.gpu_gb, given.gpus_per_node, given.device)


def _lay_out(tree: Tree, config: RunSettings, given: argparse.Namespace) -> str:
    """Put the first layout that `megarl plan` finds into the tree; return a note about it. Raises ConfigError if nothing fits."""
    models, device = models_of(config), _device(given)
    what = f"{given.gpus} GPUs of {given.gpu_gb:g} GB"
    layouts = search(config, models, device, given.gpu_gb, given.gpus, most=1)
    if not layouts:
        closest = nearest(config, models, device, given.gpu_gb, given.gpus) or "is none, for none divides it among so many"
        raise ConfigError(f"init: {given.model} does not fit {what}; the nearest layout, {closest}")
    for change in layouts[0].changes:
        put(tree, *change.split("=", 1))
    tree["cluster"]["gpu_memory_gb"] = int(given.gpu_gb) if given.gpu_gb.is_integer() else given.gpu_gb
    if device.node != device_of(given.gpu_gb).node:
        tree["cluster"]["gpus_per_node"] = device.node
    if given.gpus > device.node:
        tree["cluster"]["interface"] = INTERFACE
    host = f", a node {layouts[0].host / GB:.0f} GB of host memory" if layouts[0].host else ""
    return f"of megarl plan, for {what}: the fullest rank needs {layouts[0].bytes / GB:.1f} GB{host}"


def _reward_file(path: Path) -> str:
    """Write a reward function for the user to replace, unless the file exists; return a message about it."""
    try:
        with path.open("x") as file:
            file.write(STUB)
    except FileExistsError:
        return f"megarl: {path} already exists and is used as the reward"
    return f"megarl: wrote {path}, which compares response and answer: replace that with your reward"


def columns_of(data: Path) -> DataColumns:
    """Find the columns of a data file. ConfigError if it has no known ones."""
    rows = [row for _, row in islice(read_rows(data.absolute(), "init: DATA"), LOOKED_AT)]
    if not rows:
        raise ConfigError(f"init: {data} holds no rows")
    tools = any(row.get(TOOLS) for row in rows)
    if all(find(row, name) is not None for row in rows for name in ("chosen", "rejected")):
        return DataColumns("dpo", tools=tools)

    def common(names: Sequence[str]) -> str | None:
        return next((name for name in names if all(find(row, name) is not None for row in rows)), None)

    prompt, conversation = common(PROMPTS), common(CONVERSATIONS)
    labels = {name for name in ANSWERS if any(isinstance(find(row, name), bool) for row in rows)}  # verdicts, no answers
    answer = common([name for name in ANSWERS if name not in labels])
    if prompt is not None and answer is not None:
        return DataColumns("train", prompt, answer, all(_mathematical(str(find(row, answer))) for row in rows), tools)
    if conversation is not None:
        return DataColumns("sft", conversation, tools=tools)
    raise ConfigError(
        f"init: {data}: no known columns in {one_line(', '.join(rows[0]), 200)}: a prompt ({', '.join(PROMPTS)}) with an answer "
        f"({', '.join(ANSWERS)}), a conversation ({', '.join(CONVERSATIONS)}), or chosen and rejected; rename them, or start from "
        "examples/recipes/"
    )


def _mathematical(answer: str) -> bool:
    """Whether it is an expression with a number, or a worked solution that ends in one, as in GSM8K or MATH."""
    return "####" in answer or "\\boxed" in answer or bool(EXPRESSION.fullmatch(answer) and re.search(r"\d", answer))


def proposed(model: Path, data: Path, columns: DataColumns, cpu: bool, gpus: int) -> tuple[Tree, dict[str, str]]:
    """Propose a configuration for a model and a data file.

    Args:
        model: a Hugging Face directory.
        data: the file.
        columns: its columns.
        cpu: whether to run on the CPU.
        gpus: the number of GPUs otherwise.

    Returns:
        The configuration as a tree, and notes by key.
    """
    description = check_checkpoint(model.absolute(), mtp="drop")
    tokenizer = load_tokenizer(model.absolute())
    room, chat = description.room, bool(tokenizer.chat_template)
    source: Tree = {"type": "file", "path": str(data)}
    tree: Tree = {"name": data.stem, "seed": 1, "model": {"path": str(model), "dtype": "float32" if cpu else "bfloat16"}}
    predictors = description.family.predictors(description.config)
    further = bool(predictors) and (not has_weights(model) or any(name.startswith(predictors) for name in inventory(model)))
    tree["model"] |= {"mtp": "keep"} if further else {}
    if not cpu:
        tree["model"] |= {"recompute": "full"} if model_elements(description) >= LARGE else {}
        tree["layout"] = {"ranks": 1}
    tree["cluster"] = {"gpus": not cpu}
    tree["optimizer"] = {"lr": 1e-4 if cpu else 1e-6, "warmup_steps": 5}
    notes = {"optimizer": "the learning rate is a guess by size: 1e-4 for a few million parameters, 1e-6 for billions"}
    if further:
        notes["model"] = "its multi-token prediction layers are kept as they are: they are not trained"
    shape: Tree = {"chat": chat} if chat else {"chat": False, "template": "{prompt}"}
    if not chat:
        notes["data"] = "the tokenizer has no chat template: set the text around a prompt in template"
    elif columns.tools:
        notes["data"] = f"the chat template gets the schemas in the column {TOOLS}"
    if columns.verb == "train":
        keys = {"prompt_key": columns.prompt, "answer_key": columns.answer}
        prompts = load_prompts(
            FileSource.model_validate({"path": data.absolute(), **keys}),
            tokenizer,
            SourceFormat.model_validate(shape),
            room,
            "init: DATA",
            "the model's room",
        )
        held_out = min(HELD_OUT, max(1, len(prompts) // 10))
        maximum = max(len(prompt.ids) for prompt in prompts)
        longest = max(_rounded(maximum), min(_rounded(int(ROOM * maximum)), room // 2 // STEP * STEP))
        response = min(128 if cpu else 4096, room - longest)
        if response < 1 or len(prompts) < 2:
            raise ConfigError(f"init: {data}: {len(prompts)} prompts, the longest of {maximum} tokens, do not fit a model of {room} tokens")
        tree["algorithm"] = {"type": "gspo"}
        tree["data"] = {**shape, "train": {**source, **keys, "skip": held_out}, "eval": {**source, **keys, "rows": held_out}}
        notes["data"] = f"{len(prompts):,} rows, of which the first {held_out} are held out; {notes.get('data', '')}".rstrip("; ")
        kind = {"type": "math_verify"} if columns.mathematical else {"type": "function", "path": f"{REWARD}:score"}
        tree["reward"] = {"source": kind}
        notes["reward"] = (
            "the answers look like short expressions"
            if columns.mathematical
            else f"score(response, answer) -> float in {REWARD}.py, looked up in the directory where the command is started"
        )
        tree["rollout"] = {"samples_per_prompt": 4 if cpu else 8, "max_prompt_tokens": longest, "max_response_tokens": response}
        tree["rollout"] |= {"max_num_seqs": 32, "kv_cache_mb": 64} if cpu else {}
        notes["reward"] += "; a response cut off by rollout.max_response_tokens scores 0 unread, unless you add require_finished: false"
        notes["rollout"] = f"the longest prompt has {maximum} tokens, and the model supports at most {room}"
        tree["sync"] = {"transport": "shm" if cpu else "cuda_ipc" if gpus == 1 else "nccl"}
        tree["placement"] = {"engines": "shared" if not cpu and gpus == 1 else "apart"}
        prompts_per_step = min(8 if cpu else 64, len(prompts) - held_out)
        tokens = max(longest + response, 2048 if cpu else 16384)
        tree["train"] = {"steps": 20 if cpu else 200, "prompts_per_step": prompts_per_step, "micro_batch_tokens": tokens, "eval_every": 10}
        tree["save"] = {"every": 10 if cpu else 20}
        return tree, notes
    tree["data"] = {**shape, "train": source}
    if columns.verb == "sft":
        tree["data"]["train"] = {"type": "conversations", "path": str(data), "messages_key": columns.prompt}
        conversations = ConversationSource(path=data.absolute(), messages_key=columns.prompt)
        rows = load_conversations(conversations, tokenizer, SftData(train=conversations, **shape), room, "init: DATA")
        tokens, count, sides = _rounded(max(len(one.tokens) for one in rows)), len(rows), 1
    else:
        tree["data"]["eval"] = source
        notes["data"] = f"eval should be pairs outside the training data; {notes.get('data', '')}".rstrip("; ")
        pairs = load_preferences(
            PreferenceSource(path=data.absolute()),
            tokenizer,
            PreferenceData.model_validate(tree["data"]),
            room,
            "init: DATA",
            "the model's room",
        )
        tokens, count, sides = _rounded(max(len(side.tokens) for pair in pairs for side in (pair.chosen, pair.rejected))), len(pairs), 2
    tree[columns.verb] = {
        "steps": 100,
        "batch_size": min(16 if cpu else 64, count),
        "micro_batch_tokens": max(sides * tokens, 2048 if cpu else 16384),
        "max_tokens": tokens,
    }
    tree["save"] = {"every": 50}
    return tree, notes


def _rounded(length: int) -> int:
    return -(-length // STEP) * STEP


def put(tree: Tree, key: str, value: str) -> None:
    """Set a value in a tree.

    Args:
        tree: the configuration, changed in place.
        key: the dotted key.
        value: the value as YAML.
    """
    *above, last = key.split(".")
    for name in above:
        tree = tree.setdefault(name, {})
    tree[last] = yaml_text.read(value)


def text(tree: Mapping[str, Any], notes: Mapping[str, str], verb: str, given: argparse.Namespace) -> str:
    """The text of the configuration file, section by section, with values as JSON, which is YAML.

    Args:
        tree: the configuration.
        notes: comments by key.
        verb: the verb that reads the file.
        given: the arguments of the command line.
    """

    def lines() -> Iterator[str]:
        yield f"# Written by `megarl init {given.model} {given.data}`. Every key, its default and its meaning: megarl config {verb}"
        for key, value in tree.items():
            note = f"  # {notes[key]}" if key in notes else ""
            if not isinstance(value, dict):
                yield f"{key}: {json.dumps(value)}{note}"
                continue
            yield f"{key}:{note}"
            yield from (f"  {name}: {json.dumps(inner)}" for name, inner in value.items())

    return "\n".join(lines()) + "\n"
