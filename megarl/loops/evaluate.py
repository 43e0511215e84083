"""Evaluations of sets of prompts: `evaluate` inside a run, `run_eval` as the verb `megarl eval`."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megarl.checks.data import HeldOut
from megarl.checks.without_ranks import check_eval
from megarl.config import EvalConfig
from megarl.driver.engines import Engines, call_seed, start_engines
from megarl.engines.generate import Sampling
from megarl.loops.show_data import tell_first
from megarl.observe.estimates import SetResult, estimated
from megarl.observe.metrics import Last, Mean, Metric, merge
from megarl.observe.output import new_log
from megarl.observe.restarts import Restarts
from megarl.observe.run import Run
from megarl.observe.samples import SampleRecord, record
from megarl.observe.summary import rates, write_json
from megarl.response import Response
from megarl.rewards.score import Score
from megarl.step.context import session
from megarl.step.metrics import missing, reward_failures
from megarl.step.reward import Reward, open_scorers

EVAL_STEP = 0  # an evaluation's draws do not depend on when it is made, so that evaluations are comparable


@dataclass(frozen=True)
class Judged:
    """The responses to a set's prompts, sampled or greedy, and their scores."""

    responses: Sequence[Response]
    scores: Sequence[Score]


def evaluate(when: str, sets: Sequence[HeldOut], engines: Engines, reward: Reward, run: Run, seed: int, step: int = 0) -> dict[str, float]:
    """Evaluate every set: sample as many responses per prompt as it asks for, and the greedy one if wanted.

    The random draws depend only on `seed` and the set, not on `step`.

    Args:
        when: the run's name for these weights: base, start, end, eval.
        sets: the sets of prompts.
        engines: the engines, with these weights.
        reward: the reward for evaluations.
        run: where the numbers and the responses are reported.
        seed: the run's seed.
        step: the step of the metrics' row.

    Returns:
        The numbers by metric name, such as eval/heldout/avg@1.
    """
    results, metrics = list[SetResult](), list[dict[str, Metric]]()
    for one in sets:
        with run.phase("eval"):
            result, set_metrics, records = _ask(one, engines, reward, run, seed, step)
        results.append(result)
        metrics.append(
            {name.replace("eval/", f"eval/{one.name}{'_base' if when == 'base' else ''}/", 1): x for name, x in set_metrics.items()}
        )
        run.keep(step, records, f"{one.name}_base" if when == "base" else one.name)
    return run.evaluated(when, results, merge(metrics), step)


def _ask(
    one: HeldOut, engines: Engines, reward: Reward, run: Run, seed: int, step: int
) -> tuple[SetResult, dict[str, Metric], list[SampleRecord]]:
    """Evaluate one set; return its estimates, further metrics and the responses."""
    kinds = [(one.n, one.temperature)] + ([(1, 0.0)] if one.greedy else [])
    judged = []
    for n, temperature in kinds:
        sampling = Sampling(n, temperature, engines.settings.max_response_tokens, call_seed(seed, EVAL_STEP, one.number))
        responses = engines.generate(one.prompts, sampling, step=step)
        judged.append(Judged(responses, reward.scores(one.prompts, responses)))
        run.failures(judged[-1].scores)
    score_Pn = [list[float | None]() for _ in one.prompts]
    for response, score in zip(judged[0].responses, judged[0].scores, strict=True):
        score_Pn[response.prompt].append(score.value)
    greedy_P = [score.value for score in judged[1].scores] if one.greedy else None
    result = estimated(one.name, score_Pn, greedy_P)
    records = [
        record(one.prompts[response.prompt], response, score, greedy=number > 0)
        for number, answers in enumerate(judged)
        for response, score in zip(answers.responses, answers.scores, strict=True)
    ]
    metrics = merge([reward_failures(answers.scores) for answers in judged]) | _beside(judged[0])
    return result, metrics | ({} if result.stderr is None else {"eval/stderr": Last(result.stderr)}), records


def _beside(sampled: Judged) -> dict[str, Metric]:
    """Metrics besides the estimates: response lengths, missing scores, and the means of the reward's parts."""
    parts = defaultdict[str, list[float]](list)
    for score in sampled.scores:
        for name, value in score.parts.items():
            parts[name].append(value)
    number = float(len(sampled.responses))
    return {
        "eval/missing": missing(sampled.scores),
        "eval/response_length/mean": Mean(float(sum(response.loss_tokens for response in sampled.responses)), number),
        "eval/response_length/clip_ratio": Mean(float(sum(not response.finished for response in sampled.responses)), number),
        **{f"eval/{name}/mean": Mean(sum(values), float(len(values))) for name, values in parts.items()},
    }


def run_eval(config: EvalConfig) -> None:
    """Run `megarl eval`: write the numbers of `config.model.path` to runs/<name>/eval.json."""
    sets = check_eval(config)
    with Run(config) as run, session(config, run), open_scorers(config.reward, run.note, new_log(run.directory, "rewards")) as scorers:
        tell_first(run, config, sets[0].prompts[:1])
        with run.starting("engines"):
            engines = start_engines(config, Restarts(config.cluster.restarts, run.restarted, run.note))
        engines.note_sandbox(run.note)
        evaluate("eval", sets, engines, scorers.rewards()[1], run, config.seed)
        counts = {one.name: len(one.prompts) for one in sets}
        content = {"model": str(config.model.path), "prompts": sum(counts.values()), **rates(run.evaluations["eval"].results)}
        write_json(run.directory / "eval.json", content | {"sets": run.evaluations["eval"].plain()["results"]})
