"""Places, checkpoints and arguments of tools that are refused, as data (see `configurations`)."""

from tests.unit.bad_input.cases import (
    Case,
    Make,
    Room,
    given,
    manifest,
    piped_manifest,
    trainer,
)
from tests.unit.bad_input.configurations import DEEP, LONG


def run_directory(room: Room) -> list[str]:
    """The run's directory is a file."""
    room.runs.mkdir()
    (room.runs / "job").write_text("here before")
    return [str(room.config())]


def below_a_file(room: Room) -> list[str]:
    """The folder of all runs is below a file."""
    (room.here / "file").write_text("")
    return [str(room.config()), f"run_dir={room.here}/file/runs"]


def tool(*arguments: str) -> Make:
    """Arguments of a verb without a configuration; HERE and MODEL stand for directories."""
    return lambda room: [part.replace("HERE", str(room.here)).replace("MODEL", str(room.model)) for part in arguments]


def step_of(make: Make, *before: str) -> Make:
    """Arguments, the step directory that `make` leaves, a directory that is not there."""

    def made(room: Room) -> list[str]:
        make(Room(room.here, room.model, "train"))
        return [*before, str(room.here / "steps" / "step_000001"), str(room.here / "hf")]

    return made


TABLE = [
    # --- places
    Case("the run's directory is a file", "train", run_directory, r"^name: .*out/job: .*out/job is not a writable directory$"),
    Case("runs below a file", "eval", below_a_file, r"^run_dir: .*file is not a writable directory$"),
    *(
        Case(
            f"a long {key}",
            verb,
            given(f"{key}={LONG}"),
            rf"^{key.replace('.', '[.]')}: .*a path of 3\d\d bytes, with a name of 300 in it: at most 2048 and 255 are allowed",
        )
        for verb, key in (
            ("train", "model.path"),
            ("train", "run_dir"),
            ("train", "name"),
            ("train", "model.weights"),
            ("rm", "data.train.path"),
        )
    ),
    Case(
        "a long path",
        "train",
        given("run_dir=" + "x/" * 2000),
        r"^run_dir: .*a path of 3999 bytes, with a name of 1 in it: at most 2048 and 255 are allowed",
    ),
    Case(
        "a long path of prompts",
        "train",
        given(f"data.train={{type: file, path: {LONG}.jsonl}}"),
        r"^data\.train\.path: .*a name of 306 in it",
    ),
    # --- checkpoints
    Case("a manifest that is a pipe", "train", piped_manifest, r"^model\.weights: checkpoint: .*: manifest\.json: not a plain file$"),
    Case("a manifest of lists", "train", manifest(DEEP), r"^model\.weights: .*manifest\.json: damaged: ValueError: nested too deeply$"),
    Case("a manifest that is a number", "train", manifest(b"3"), r"^model\.weights: .*manifest\.json: damaged: "),
    Case(
        "a manifest of a text's step",
        "train",
        manifest(step="1"),
        r"manifest\.json: damaged: step: Input should be a valid integer \(got '1'\)$",
    ),
    Case("a manifest of a list of models", "train", manifest(models=[1]), r"manifest\.json: damaged: models: .*\(got \[1\]\)$"),
    Case(
        "a manifest of a model that is a number",
        "train",
        manifest(models={"policy": 3}),
        r"manifest\.json: damaged: models\.policy: .*\(got 3\)$",
    ),
    Case(
        "a manifest of a model without its optimizer",
        "train",
        manifest(models={"policy": {}}),
        r"manifest\.json: damaged: models: .*policy does not say what its optimizer is",
    ),
    Case("a manifest of a layout that is a text", "train", manifest(layout="tp"), r"manifest\.json: damaged: layout: "),
    Case(
        "a manifest of files that are numbers",
        "train",
        manifest(files={"trainer.json": {"size": "9", "xxh128": 1}}),
        r"manifest\.json: damaged: files\.trainer\.json\.size: ",
    ),
    *(
        Case(f"trainer.json: {name}", "train", make, rf"^save\.resume: .*trainer\.json: {line}")
        for name, make, line in (
            ("lists", trainer(DEEP), ".*recursion limit"),
            ("a number", trainer(b"3"), "Input should be an object"),
            ("a verb that is a number", trainer(verb=3), "verb: Input should be a valid string"),
            ("progress that is a list", trainer(progress=[]), "progress: "),
            ("a sampler without its count", trainer(progress={"step": 1, "sampler": {}}), r"progress\.sampler\.count: Field required"),
            ("a step that is a text", trainer(progress={"step": "1", "sampler": {"count": 64}}), r"progress\.step: "),
            ("a run without its bytes", trainer(run={"step": 1, "learned": 1}), r"run\.metrics_bytes: Field required"),
            ("a folder outside", trainer(where={"policy": "../../x"}), r"where\.policy: String should match"),
            ("a configuration that is a number", trainer(config="3"), "config: "),
            ("a configuration that is a bomb", trainer(config="a: [" + "[" * 99), "config: .*more than 32 levels"),
        )
    ),
    # --- tools
    *(
        Case(
            f"--shard-gb {size}",
            "convert",
            step_of(manifest(), "megatron-to-hf", "--shard-gb", size),
            r"^convert: --shard-gb \S+ is not a valid file size$",
        )
        for size in ("nan", "inf", "1e300", "0")
    ),
    Case(
        "a billion ranks to cut for",
        "convert",
        tool("hf-to-megatron", "MODEL", "HERE/out", "--tp", "1000000000"),
        r"^convert: --tp 1000000000 is more than 4096$",
    ),
    Case(
        "a billion threads",
        "convert",
        tool("hf-to-megatron", "MODEL", "HERE/out", "--workers", "1000000000"),
        r"^convert: --workers 1000000000 is more than 4096$",
    ),
    Case("a long source", "convert", tool("hf-to-megatron", LONG, "HERE/out"), r"^convert: a path of 300 bytes"),
    Case("a long target", "convert", tool("hf-to-megatron", "MODEL", f"HERE/{LONG}"), r"^convert: a path of \d+ bytes, with a name of 300"),
    Case("a long directory to verify", "verify", tool(LONG), r"^verify: a path of 300 bytes"),
]
