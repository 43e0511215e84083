"""Configurations that are refused, as data: what is wrong, the verb, how the input is made, the line that it gets."""

from __future__ import annotations

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


NUMBER, INTEGER = "Input should be a valid number", "Input should be a valid integer"
TABLE = [
    # --- what YAML 1.1 would have taken for a number or a boolean
    Case("true for an integer", "train", given("train.steps=true"), rf"^train\.steps: {INTEGER} \(got True\)$"),
    Case("on for an integer", "train", given("train.steps=on"), rf"^train\.steps: {INTEGER} \(got 'on'\)$"),
    Case("octal", "train", given("train.steps=010"), rf"^train\.steps: {INTEGER} \(got '010'\)$"),
    Case("hexadecimal", "train", given("train.steps=0x10"), rf"^train\.steps: {INTEGER} \(got '0x10'\)$"),
    Case("binary", "train", given("train.steps=0b11"), rf"^train\.steps: {INTEGER} \(got '0b11'\)$"),
    Case("sexagesimal", "train", given("train.steps=1:30"), rf"^train\.steps: {INTEGER} \(got '1:30'\)$"),
    Case("sexagesimal seconds", "train", given("reward.timeout_s=1:30.5"), rf"^reward\.timeout_s: {NUMBER} \(got '1:30.5'\)$"),
    Case("underscores", "train", given("train.steps=1_000"), rf"^train\.steps: {INTEGER} \(got '1_000'\)$"),
    Case("text for an integer", "train", given("train.steps='3'"), rf"^train\.steps: {INTEGER} \(got '3'\)$"),
    Case("float for an integer", "train", given("train.steps=3.0"), rf"^train\.steps: {INTEGER} \(got 3.0\)$"),
    Case("true for a number", "train", given("optimizer.lr=true"), rf"^optimizer\.lr: {NUMBER} \(got True\)$"),
    Case("text for a number", "train", given("optimizer.lr='1e-3'"), rf"^optimizer\.lr: {NUMBER} \(got '1e-3'\)$"),
    Case("true in a list of numbers", "train", given("optimizer.betas=[0.9, true]"), rf"^optimizer\.betas\.1: {NUMBER} \(got True\)$"),
    Case("integer for a boolean", "train", given("log.tensorboard=1"), r"^log\.tensorboard: Input should be a valid boolean \(got 1\)$"),
    Case("yes for a boolean", "train", given("data.shuffle=yes"), r"^data\.shuffle: Input should be a valid boolean \(got 'yes'\)$"),
    Case("date for a number", "train", given("seed=2026-11-22"), rf"^seed: {INTEGER} \(got '2026-11-22'\)$"),
    Case(
        "true in the file",
        "sft",
        config(b"name: a\nmodel: {path: m}\ndata: {train: {path: x, type: file}}\nsft: {steps: true}"),
        r"^sft\.steps: ",
    ),
    Case("true for a coefficient", "train", given("algorithm.kl_coef=true"), rf"^algorithm\.kl_coef: {NUMBER} \(got True\)$"),
    # --- what is no tree
    Case(
        "a key twice in an override",
        "train",
        given("train={steps: 1, steps: 2}"),
        r"^train: .* the key 'steps' is given twice \(line 1, column 12\)$",
    ),
    Case(
        "a key twice, once quoted",
        "train",
        config(b"name: a\n'name': b"),
        r"^config: .*the key 'name' is given twice \(line 2, column 1\)$",
    ),
    Case("a number as a key", "train", config(b"1: 2"), r"^config: .*a key is not a string \(line 1, column 1\)$"),
    Case("a list as a key", "train", config(b"? [1]\n: 2"), r"^config: .*a key is not a string"),
    Case("a merge", "train", given("log={<<: {tensorboard: true}}"), r"^log\.<<: unknown key$"),
    Case("a tag", "train", config(b"name: !!python/object/apply:os.getcwd []"), r"^config: .*the tag .*os\.getcwd.*\(line 1, column 7\)$"),
    Case("bytes", "train", given("name=!!binary aGk="), r"^name: .*the tag"),
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
    Case("a NUL", "train", given('model.path="a\\0b"'), r"^model\.path: .*a NUL"),
    Case("half a surrogate pair in an argument", "train", given("name=\udcff"), r"^name: .*special characters are not allowed"),
    Case("a control character", "train", given("name=a\x07b"), r"^name: .*special characters are not allowed"),
    Case("an integer of 5,000 digits", "train", given("train.steps=" + "9" * 5000), r"^train\.steps: .*4300 digits"),
    Case("a configuration with a long name", "train", lambda room: [f"{room.here}/{LONG}"], r"^config: .*File name too long$"),
    Case("an unreadable configuration", "train", lambda room: ["/proc/self/mem"], r"^config: /proc/self/mem: Input/output error$"),
    Case("a directory as a configuration", "train", lambda room: [str(room.here)], r"^config: no such file: "),
    Case(
        "the engine's log-probs corrected by themselves",
        "train",
        given("train.old_logp=rollout", "algorithm.correction={type: tis}"),
        r"^train\.old_logp=rollout: algorithm\.correction\.type=tis weights old by rollout",
    ),
    Case(
        "replay of a pass that is left out",
        "train",
        given("train.old_logp=rollout", "routing.replay=r2"),
        r"^train\.old_logp=rollout: routing\.replay=r2 replays",
    ),
    *(
        Case(wrong, "train", given("train.logp_over=kept", *overrides), rf"^train\.logp_over=kept: {line}")
        for wrong, overrides, line in (
            ("kept tokens of a whole distribution", (), r"rollout\.top_p=1, top_k=0 and min_p=0 keep every token"),
            (
                "kept tokens without the pass that finds them",
                ("rollout.top_p=0.9", "train.old_logp=rollout"),
                r"the pass that train\.old_logp",
            ),
            (
                "kept tokens and a teacher",
                ("rollout.top_p=0.9", "algorithm={type: reinforce}", "distillation={teacher: m}"),
                "distillation compares policy and teacher over the whole",
            ),
            (
                "kept tokens for ranks of the reference's own",
                ("rollout.top_p=0.9", "algorithm.kl_coef=0.1", "placement.reference={ranks: 1}"),
                r"the kept tokens stay on the policy's ranks, where placement\.reference must",
            ),
        )
    ),
    # --- numbers without end
    *(
        Case(f"{key}={value}", "train", given(f"{key}={value}"), rf"^{key.replace('.', '[.]')}: Input should be a finite number")
        for value in (".inf", "-.inf", ".nan")
        for key in ("algorithm.kl_coef", "algorithm.kl_target", "algorithm.entropy_coef", "algorithm.clip_high", "optimizer.lr")
    ),
    *(
        Case(f"engines ahead: {' '.join(given_)}", "train", given(*given_), rf"^{key}: .*{said}")
        for key, given_, said in (
            ("rollout[.]mode=ahead", ("rollout.mode=ahead",), "nothing corrects for it: set algorithm[.]correction"),
            (
                "rollout[.]mode=ahead",
                ("rollout.mode=ahead", "train.old_logp=rollout", "placement.engines=shared"),
                "placement[.]engines=shared lets only one side work at a time$",
            ),
            (
                "rollout[.]budget_tokens=None with rollout[.]mode=budget",
                ("rollout.mode=budget", "train.old_logp=rollout"),
                "budget needs it",
            ),
            ("rollout[.]max_lag=None with rollout[.]mode=free", ("rollout.mode=free", "train.old_logp=rollout"), "free needs it"),
            (
                "algorithm[.]type=remax",
                ("rollout.mode=free", "rollout.max_lag=2", "algorithm={type: remax, correction: {type: tis}}"),
                "does not go with rollout[.]mode=free, whose responses",
            ),
            ("rollout[.]budget_tokens=8 with rollout[.]mode=sync", ("rollout.budget_tokens=8",), "no other mode takes it$"),
            (
                "train[.]dynamic_sampling_rounds",
                ("rollout.mode=budget", "rollout.budget_tokens=8", "train.old_logp=rollout", "train.dynamic_sampling_rounds=2"),
                "does not go with rollout[.]mode=budget, whose responses",
            ),
            (
                "rollout[.]stop",
                ("rollout.mode=budget", "rollout.budget_tokens=8", "train.old_logp=rollout", "rollout.stop=[x]"),
                "does not go with rollout[.]mode=budget",
            ),
        )
    ),
    Case("no budget", "train", given("rollout.budget_tokens=0"), r"^rollout\.budget_tokens: "),
    Case("an unknown quantisation", "train", given("rollout.quantization=int4"), r"^rollout\.quantization: .*'fp8'"),
    *(
        Case(
            f"fp8 blocks that do not fit ({verb})",
            verb,
            given("rollout.quantization=fp8"),
            r"^rollout\.quantization=fp8: with rollout\.tp=1 a worker holds 64 rows of model\.layers\.0\.[a-z_.]*, not a multiple of 128$",
        )
        for verb in ("train", "eval", "pairs")
    ),
    Case("an unknown mode", "train", given("rollout.mode=behind"), r"^rollout\.mode: "),
    Case("a mode of engines alone", "eval", given("rollout.mode=ahead"), r"^rollout\.mode: unknown key"),
    Case("a correction's bound", "train", given("algorithm.correction={type: tis, high: .inf}"), r"^algorithm\.correction\.\w+: "),
    Case("a critic's discount", "train", given("critic={}", "algorithm={type: ppo, gamma: .nan}"), r"^algorithm\.gamma: .*finite"),
    Case("beta of dpo", "dpo", given("algorithm.beta=.inf"), r"^algorithm\.beta: Input should be a finite number"),
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
    Case(
        "NaN for Megatron",
        "train",
        given("model.megatron={moe_z_loss_coeff: .nan}"),
        r"^model\.megatron\.moe_z_loss_coeff: nan is not finite",
    ),
    Case(
        "a reward beyond float32",
        "train",
        given("reward.overlong={buffer_tokens: 1, scale: 1e300}"),
        r"^reward\.overlong\.scale: 1e\+300 is not finite in float32$",
    ),
    Case("a rate beyond float32", "train", given("optimizer.lr=1e300"), r"^optimizer\.lr: 1e\+300 is not finite in float32$"),
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
    Case(
        "a save that outlasts a phase",
        "train",
        given("save.timeout_s=400", "cluster.phase_timeout_s=600"),
        r"^save\.timeout_s=400: more than half of cluster\.phase_timeout_s=600$",
    ),
    Case(
        "a pause of 1e30 s",
        "train",
        given("reward.source={type: http, url: 'http://x', backoff_s: 1e30}"),
        r"^reward\.source\.backoff_s: .*86400",
    ),
    Case(
        "an integer of 100 bits",
        "train",
        given("train.micro_batch_tokens=1" + "0" * 30),
        r"^train\.micro_batch_tokens: an integer of 100 bits, more than 63$",
    ),
    Case(
        "a billion items",
        "train",
        given("data.train.items=1000000000"),
        r"^data\.train\.items: .*less than or equal to 1000000 \(got 1000000000\)$",
    ),
    Case(
        "a billion items to leave out",
        "eval",
        given("data.eval.exclude={dataset: spell_backward, seed: 1, items: 1000000000}"),
        r"^data\.eval\.exclude\.items: ",
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
    Case("a billion ranks", "train", given("layout.ranks=1000000000"), r"^layout\.ranks: .*1048576"),
    Case("a billion engines", "train", given("rollout.replicas=1000000000"), r"^rollout\.replicas: .*65536"),
    Case("a billion data-parallel ranks", "train", given("rollout.dp=1000000000"), r"^rollout\.dp: .*65536"),
    Case(
        "an engine of more GPUs than experts",
        "train",
        given("rollout.dp=8", "rollout.tp=2", "rollout.expert_parallel=true"),
        r"^rollout\.expert_parallel=true: 8 experts for rollout\.dp\*rollout\.tp=8\*2=16 GPUs$",
    ),
    Case("a billion scorers", "train", given("reward.workers=1000000000"), r"^reward\.workers: .*4096"),
    Case("a billion responses", "train", given("rollout.samples_per_prompt=1000000000"), r"^rollout\.samples_per_prompt: .*65536"),
    Case("2^63 megabytes", "train", given("rollout.kv_cache_mb=9223372036854775807"), r"^rollout\.kv_cache_mb: .*1073741824"),
    Case(
        "a service without a token",
        "serve",
        given("cluster.interface=eth0"),
        r"^serve\.token_env: required with cluster\.interface=eth0, where other machines reach the port$",
    ),
    Case(
        "host memory alone",
        "train",
        given("cluster.host_memory_gb=900"),
        r"^cluster\.host_memory_gb=900: needs cluster\.gpu_memory_gb, which is not set$",
    ),
    Case(
        "a host with a long name",
        "train",
        given(f"reward.source={{type: http, url: 'http://{LONG}/x'}}"),
        r"^reward\.source\.url: .*label too long",
    ),
]
