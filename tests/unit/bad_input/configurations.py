"""Configurations that are refused and no line of `refusals.txt` can say: what is wrong, the verb, how it is made, the line that it gets."""

from tests.unit.bad_input.cases import Case, Room, config, given

LONG = "x" * 300
DEEP = b"[" * 100_000


def bomb(levels: int = 9) -> bytes:
    """10^levels values in a few hundred bytes."""
    lists = [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, levels)]
    return "\n".join([f"a0: &a0 [{', '.join('1' * 10)}]", *lists]).encode()


def chain(room: Room, files: int = 1200) -> list[str]:
    """Files that each lie over the next."""
    for number in range(files):
        (room.here / f"{number}.yaml").write_text(f"base: {number + 1}.yaml\n")
    (room.here / f"{files}.yaml").write_text("name: end\n")
    return [str(room.here / "0.yaml")]


TABLE = [
    Case(
        "true in the file",
        "sft",
        config(b"name: a\nmodel: {path: m}\ndata: {train: {path: x, type: file}}\nsft: {steps: true}"),
        r"^sft\.steps: ",
    ),
    # --- what is no tree
    Case(
        "a key twice, once quoted",
        "train",
        config(b"name: a\n'name': b"),
        r"^config: .*the key 'name' is given twice \(line 2, column 1\)$",
    ),
    Case("a number as a key", "train", config(b"1: 2"), r"^config: .*a key is not a string \(line 1, column 1\)$"),
    Case("a list as a key", "train", config(b"? [1]\n: 2"), r"^config: .*a key is not a string"),
    Case("a tag", "train", config(b"name: !!python/object/apply:os.getcwd []"), r"^config: .*the tag .*os\.getcwd.*\(line 1, column 7\)$"),
    Case("two documents", "train", config(b"--- {name: a}\n--- {name: b}"), r"^config: .*another document"),
    Case("an alias in its anchor", "train", config(b"name: &a [*a]"), r"^config: .*an alias inside its own anchor \(line 1, column 11\)$"),
    Case("an alias of nothing", "train", config(b"name: *a"), r"^config: .*undefined alias 'a'"),
    Case("a billion values", "train", config(bomb()), r"^config: .*more than 10,000 values"),
    Case(
        "a billion values in an override",
        "train",
        given(f"train={{{', '.join(bomb().decode().splitlines())}}}"),
        r"^train: .*more than 10,000 values",
    ),
    Case(
        "100,000 unknown keys",
        "train",
        config(lambda: b"".join(b"k%d: 1\n" % n for n in range(100_000))),
        r"^config: .*(more than 10,000 values|bytes, more than)",
    ),
    Case(
        "4,000 unknown keys", "train", config(lambda: b"".join(b"k%d: 1\n" % n for n in range(4000))), r"^config: 3,9\d\d further errors$"
    ),
    Case("nested lists", "train", config(DEEP), r"^config: .*more than 32 levels"),
    Case("nested mappings", "train", config(b"{a: " * 5000), r"^config: .*more than 32 levels"),
    Case("nested blocks", "train", config(lambda: b"".join(b" " * n + b"a:\n" for n in range(900))), r"^config: .*more than 32 levels"),
    Case("nested in an override", "train", given("train=" + "[" * 5000), r"^train: .*more than 32 levels"),
    Case("an override of 5,000 keys", "train", given("a." * 5000 + "b=1"), r"^override 'a\.a\..{0,200}: more than 32 levels$"),
    Case("a huge file", "train", config(b"#" * (5 << 20)), r"^config: .* has 5,242,880 bytes, more than 1,048,576$"),
    Case("a chain of bases", "train", chain, r"^base: .*0\.yaml extends more than 16 files$"),
    Case("a base that is a number", "train", config(b"base: 3"), r"^config: .*base must be a file name, not 3$"),
    Case("a base with a long name", "train", config(f"base: {LONG}.yaml".encode()), r"^base: .*File name too long$"),
    Case("half a surrogate pair", "train", config(b'name: "\\ud800"'), r"^config: .*half a surrogate pair.*\(line 1, column 7\)$"),
    Case("half a surrogate pair in an argument", "train", given("name=\udcff"), r"^name: .*special characters are not allowed"),
    Case("a control character", "train", given("name=a\x07b"), r"^name: .*special characters are not allowed"),
    Case("an integer of 5,000 digits", "train", given("train.steps=" + "9" * 5000), r"^train\.steps: .*4300 digits"),
    Case("a configuration with a long name", "train", lambda room: [f"{room.here}/{LONG}"], r"^config: .*File name too long$"),
    Case("an unreadable configuration", "train", lambda room: ["/proc/self/mem"], r"^config: /proc/self/mem: Input/output error$"),
    Case("a directory as a configuration", "train", lambda room: [str(room.here)], r"^config: no such file: "),
    # --- numbers without end
    *(
        Case(f"{key}={value}", "train", given(f"{key}={value}"), rf"^{key.replace('.', '[.]')}: Input should be a finite number")
        for value in (".inf", "-.inf", ".nan")
        for key in ("algorithm.kl_coef", "algorithm.kl_target", "algorithm.entropy_coef", "algorithm.clip_high", "optimizer.lr")
    ),
    *(
        Case(
            f"fp8 blocks that do not fit ({verb})",
            verb,
            given("rollout.quantization=fp8"),
            r"^rollout\.quantization=fp8: with rollout\.tp=1 a worker holds 64 rows of model\.layers\.0\.[a-z_.]*, not a multiple of 128$",
        )
        for verb in ("train", "eval", "pairs")
    ),
    Case("a correction's bound", "train", given("algorithm.correction={type: tis, high: .inf}"), r"^algorithm\.correction\.\w+: "),
    *(
        Case(f"{key} of another type", verb, given(*more, f"{key}=1"), rf"^{key.replace('.', '[.]')}: unknown key \({said}\)$")
        for verb, key, more, said in (
            ("dpo", "algorithm.gamma", (), "a key of type simpo; this is dpo"),
            ("dpo", "algorithm.label_smoothing", ("algorithm={type: simpo}",), "a key of type dpo; this is simpo"),
            (
                "train",
                "algorithm.clip_low",
                ("algorithm={type: raft}",),
                r"a key of types ppo, vc_ppo, vapo, grpo and \d+ more; this is raft",
            ),
            ("train", "algorithm.correction.lo", ("algorithm.correction.type=tis",), "a key of types mis, icepop; this is tis"),
            ("train", "reward.source.url", ("reward.source={type: reasoning_gym}",), "a key of type http; this is reasoning_gym"),
        )
    ),
    Case("gamma of simpo", "dpo", given("algorithm={type: simpo, margin: .nan}"), r"^algorithm\.\w+: "),
    *(
        Case(f"{key}=1e300", "train", given(f"{key}=1e300"), rf"^{key.replace('.', '[.]')}: Input should be less than or equal to")
        for key in (
            "reward.timeout_s",
            "rollout.timeout_s",
            "sync.timeout_s",
            "cluster.start_timeout_s",
            "cluster.stall_timeout_s",
            "reward.sandbox.memory_gb",
        )
    ),
    *(
        Case(f"2^62 {key}", verb, given(f"{key}={1 << 62}", *more), rf"^{key.replace('.', '[.]')}: .*less than or equal to {most} ")
        for verb, key, most, more in (
            ("train", "train.epochs", 1000, ()),
            ("train", "train.steps", 10**9, ()),
            ("train", "train.dynamic_sampling_rounds", 1000, ()),
            ("train", "rollout.max_num_seqs", 1 << 16, ()),
            ("train", "critic.epochs", 1000, ("algorithm={type: vapo}",)),
            ("value", "critic.pretrain_steps", 10**9, ("algorithm={type: vapo}",)),
            ("train", "optimizer.warmup_steps", 10**9, ()),
            ("sft", "sft.steps", 10**9, ()),
            ("sft", "sft.batch_size", 1 << 16, ()),
        )
    ),
    Case(
        "a host with a long name",
        "train",
        given(f"reward.source={{type: http, url: 'http://{LONG}/x'}}"),
        r"^reward\.source\.url: .*label too long",
    ),
]
