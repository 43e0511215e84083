"""Files of runs, and what other verbs without a configuration are given, that are refused, as data (see `configurations`)."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.unit.bad_input.cases import Case, Make, Room
from tests.unit.bad_input.configurations import DEEP, LONG
from tests.unit.bad_input.directories import tool

SAMPLE = {"prompt": "1 + 1?", "answer": "2", "response": "2", "reward": 1.0, "parts": {}, "error": None}
SAMPLE |= {"finish_reason": "stop", "length": 1, "sample": 0, "greedy": False, "turns": 1, "scored": True}
ROW, SUMMARY = {"step": 1, "reward/mean": 0.5}, {"wall_s": {"rollout": 1.0}, "alarms": {}}
HUGE = 10**400  # no float
FILES = {
    "metrics.jsonl": json.dumps(ROW).encode() + b"\n",
    "config.yaml": b"name: x\n",
    "samples/step_1.jsonl": json.dumps(SAMPLE).encode(),
}
Spoil = Callable[[Path], object]


def run(name: str, spoil: bytes | Spoil | None = None) -> Callable[[Room], Path]:
    """A run's directory, one of whose files holds these bytes, or is made by a function."""

    def make(room: Room) -> Path:
        for one, held in FILES.items():
            path = room.here / "run" / one
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(held)
        path = room.here / "run" / name
        path.unlink(missing_ok=True)
        if isinstance(spoil, bytes):
            path.write_bytes(spoil)
        elif spoil is not None:
            spoil(path)
        return room.here / "run"

    return make


def of(make: Callable[[Room], Path], *before: str) -> Make:
    """The arguments `before`, and the directory."""
    return lambda room: [*before, str(make(room))]


def sample(**changes: Any) -> Make:
    """A run one of whose samples says otherwise."""
    return of(run("samples/step_1.jsonl", json.dumps({**SAMPLE, **changes}).encode()))


def summary(value: Any) -> Make:
    """A run with this summary."""
    return of(run("summary.json", value if isinstance(value, bytes) else json.dumps(value).encode()))


def drawn(*arguments: str) -> Make:
    """A good run, with arguments after it."""
    return lambda room: [*of(run("none"))(room), *arguments]


def own(*arguments: str, name: str = "rows.jsonl", rows: bytes = b'{"prompt": "1 + 1?", "answer": "2"}\n' * 4) -> Make:
    """The tiny model, a file of data, further arguments."""

    def make(room: Room) -> list[str]:
        (room.here / name).write_bytes(rows)
        return [str(room.model), str(room.here / name), f"--out={room.here}/own.yaml", *arguments]

    return make


def asked(room: Room) -> list[str]:
    """The tiny model, a file of prompts."""
    (room.here / "rows.jsonl").write_text('{"prompt": "1 + 1?"}')
    return [str(room.model), "--file", str(room.here / "rows.jsonl")]


def piped_data(room: Room) -> list[str]:
    """What `Dataset.save_to_disk` wrote, whose rows are a pipe, at which nobody writes."""
    (folder := room.here / "saved").mkdir()
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    os.mkfifo(folder / "data.arrow")
    return [str(room.model), "--file", str(folder)]


def job(*arguments: str) -> Make:
    """A job of the good configuration, whose script is printed."""
    return lambda room: [str(Room(room.here, room.model, "train").config()), "--nodes=1", "--dry-run", *arguments]


def loop(path: Path) -> None:
    path.symlink_to(path.name)


TABLE = [
    # --- samples
    *(
        Case(f"a sample's {name}", "samples", sample(**changes), rf"^.*step_1\.jsonl:1: no sample: {line}")
        for name, changes, line in (
            ("reward that is a text", {"reward": "1"}, "reward: Input should be a valid number"),
            ("reward that is a list", {"reward": [1]}, "reward: "),
            ("parts that are a list", {"parts": [1]}, "parts: Input should be an object"),
            ("part that is a text", {"parts": {"raw": "1"}}, "parts.raw: "),
            ("response that is null", {"response": None}, "response: "),
            ("answer that is a number", {"answer": 3}, "answer: "),
            ("prompt that is a number", {"prompt": 3}, "prompt"),
            ("message without a role", {"prompt": [{"content": "x"}]}, "prompt.*a message needs a text 'role' and a text 'content'"),
            ("error that is a list", {"error": ["x"]}, "error: "),
            ("turns that are a text", {"turns": "2"}, "turns: "),
            ("length that is a mapping", {"length": {}}, "length: "),
        )
    ),
    *(
        Case(f"samples: {name}", "samples", of(run("samples/step_1.jsonl", spoil)), rf"^.*step_1\.jsonl:{line}")
        for name, spoil, line in (
            ("lists", DEEP, "1: no sample: nested too deeply"),
            ("a number", b"3", "1: no sample: : Input should be an object"),
            ("a line that is cut", b'{"prompt": "x', "1: no sample: Unterminated string"),
            ("a line of 65 MB", b"x" * (65 << 20), "1: a line of more than 67,108,864 bytes$"),
            ("a pipe", os.mkfifo, " not a plain file$"),
            ("a device", lambda path: path.symlink_to("/dev/zero"), " not a plain file$"),
            ("a link to itself", loop, " missing$"),
            ("a directory", Path.mkdir, " not a plain file$"),
        )
    ),
    Case("samples named to move the cursor", "samples", of(run("samples/eval_\x1b[2J_step_1.jsonl", b"{}")), r"eval_\\x1b\[2J_step_1"),
    Case("no samples", "samples", drawn("--most", "0"), "^samples: --most 0: must be 1 or more$"),
    Case("a long run", "samples", tool(LONG), "^samples: x+: File name too long$"),
    Case("an escape sequence for a run", "samples", tool("\x1b[2J"), r"^samples: no such directory: \\x1b\[2J$"),
    Case("an option's value that argparse loses", "samples", drawn("--search=--"), "^--search=--: -- is not a valid option value$"),
    # --- compare, and how a job stands
    *(
        Case(f"{verb} metrics: {name}", verb, of(run("metrics.jsonl", spoil), *before), rf"metrics\.jsonl:1: {line}")
        for verb, before in (("compare", ()), ("slurm", ("status",)))
        for name, spoil, line in (
            ("no step", b'{"reward/mean": 1}\n', "not a row of metrics: "),
            ("a step that is NaN", b'{"step": NaN}\n', "not a row of metrics: "),
            ("a step of 400 digits", json.dumps({"step": HUGE}).encode() + b"\n", "not a row of metrics: "),
            ("lists", DEEP + b"\n", "not a row of metrics: "),
            ("a line of 65 MB", b"x" * (65 << 20), "a line of more than 67,108,864 bytes$"),
        )
    ),
    *(
        Case(f"summary.json: {name}", "compare", summary(value), rf"^compare: .*run: .*{line}")
        for name, value, line in (
            ("a list", [], "Input should be an object"),
            ("lists", DEEP, "nested too deeply"),
            ("no seconds", {"alarms": {}}, "wall_s: Field required"),
            ("seconds that are a text", {**SUMMARY, "wall_s": {"rollout": "1"}}, "wall_s.rollout: "),
            ("alarms that are a number", {**SUMMARY, "alarms": 3}, "alarms: Input should be an object"),
        )
    ),
    Case("a summary that is a pipe", "compare", of(run("summary.json", os.mkfifo)), "^compare: .*not a plain file"),
    Case("a run's configuration in Latin-1", "compare", of(run("config.yaml", b"name: \xff")), "^compare: .*'utf-8' codec"),
    Case("a run's configuration of 2 MB", "compare", of(run("config.yaml", b"x" * (2 << 20))), "^compare: .*2,097,152 bytes, more than"),
    Case("a picture of no kind", "compare", drawn("--picture=picture"), "^compare: --picture picture: unknown picture format"),
    Case("17 runs", "compare", tool(*["HERE"] * 17), "^compare: 17 runs, more than 16$"),
    # --- jobs
    *(
        Case(
            f"a job with {given.partition('=')[0]} of two lines",
            "slurm",
            job(given),
            rf"^slurm: {given.partition('=')[0]} .*is not printable",
        )
        for given in (
            "--partition=a\n#SBATCH --x",
            "--account=a\nb",
            "--exclude=a\x1b[2J",
            "--python=a\nb",
            "--sbatch=--a\rb",
            "--mount=a\nb",
        )
    ),
    *(
        Case(f"a job with {given}", "slurm", job(given), rf"^slurm: {line}")
        for given, line in (
            ("--nodes=0", "--nodes 0 is not between 1 and 100,000$"),
            ("--gpus-per-node=1000000000", "--gpus-per-node 1000000000 is not between 0 and 100,000$"),
            ("--grace=-5", "--grace -5 is not between 10 and 100,000$"),
            ("--time=1:2:3:4", "--time '1:2:3:4' is not a time limit"),
        )
    ),
    Case("a job of 5,000 digits of minutes", "slurm", job(f"--time={'9' * 5000}"), "^slurm: --time '9+"),
    Case("a long container", "slurm", job(f"--container={LONG}"), "^slurm: .*x+: File name too long$"),
    # --- init and generate
    *(
        Case(f"init --gpu-gb {size}", "init", own(f"--gpu-gb={size}"), rf"^init: --gpu-gb {size}: must be above 0, and 1,000,000 at most$")
        for size in ("nan", "inf", "0.0", "-1.0")
    ),
    Case("init --gpus-per-node 0", "init", own("--gpus-per-node=0"), "^init: --gpus-per-node 0 is not between 1 and 1024$"),
    Case(
        "data named over two lines", "init", own("--cpu", name="a\nmodel: x.jsonl"), r"^init: DATA '.*\\nmodel: x\.jsonl' is not printable"
    ),
    Case("data of no UTF-8 name", "init", own("--cpu", name="\udcff.jsonl"), "^init: DATA .* is not printable text on one line$"),
    Case(
        "data of hostile columns",
        "init",
        own("--cpu", rows=b'{"\\u001b[2J\\n": 1}'),
        "^init: .*: no known columns in \N{REPLACEMENT CHARACTER}",
    ),
    *(
        Case(f"pairs {name}", "init", own("--cpu", rows=json.dumps(row).encode()), rf"^init: DATA\.path: .*rows\.jsonl:1: {line}")
        for name, row, line in (
            ("of no prompt", {"chosen": "a", "rejected": "b"}, ".*prompt"),
            ("that are numbers", {"prompt": "1", "chosen": 1, "rejected": 2}, "chosen must be a text or a list of chat messages, not int$"),
            ("of one response", {"prompt": "1", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same response$"),
        )
    ),
    Case("long data", "init", tool("MODEL", f"HERE/{LONG}", "--out=HERE/own.yaml"), "^init: .*x+: File name too long$"),
    Case("a place that cannot be written", "init", own("--cpu", "--out=/proc/own.yaml"), "^init: /proc/own.yaml: No such file"),
    Case("prompts in a pipe", "generate", piped_data, "^--file: .*it names data.arrow, which is not a file in the directory$"),
    Case("a long file of prompts", "generate", tool("MODEL", "--file", LONG), "^--file: x+: File name too long$"),
    Case("a long model", "generate", tool(f"HERE/{LONG}", "x"), "^MODEL: .*x+: File name too long$"),
    Case(
        "a choice of 10^30 tokens",
        "generate",
        tool("MODEL", "x", f"--top-k={10**30}"),
        "^--top-k 10+: an integer of 100 bits, more than 31$",
    ),
    Case("a key of rows to move the cursor", "config", tool("train", "\x1b[2J"), r"^\\x1b\[2J: megarl train has no such key"),
    Case("a long configuration to plan", "plan", tool(LONG), "File name too long$"),
    Case(
        "a memory of nothing", "plan", tool("HERE/job.yaml", "--gpu-gb=nan"), "^plan: --gpu-gb nan: must be above 0, and 1,000,000 at most$"
    ),
]
