"""`megarl generate MODEL`: a model's responses to one prompt, to a file of prompts, or in a chat, from the engine used in training."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import math
import os
import re
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
from pydantic import ValidationError

from megarl.batch import Sample
from megarl.cluster.machine import gpus_here
from megarl.config import ConfigError, FileSource, ModelSettings, PromptFormat, RolloutSettings
from megarl.data.columns import at
from megarl.data.files import read_rows
from megarl.data.images import ImageReader, reader_of
from megarl.data.messages import Message, arguments_of, checked, mapping, tools_of
from megarl.data.prompts import Prompt, Renderer
from megarl.data.rows import Row, seen
from megarl.data.tokenizer import load_tokenizer
from megarl.engines.engine import RolloutError, Scoring, Setup, Text, TokenScores
from megarl.engines.generate import Generated, Sampling, TokenPrompt, generate, text_of
from megarl.engines.registry import check_engine, engine_type
from megarl.engines.responder import Responder
from megarl.errors import naming_files
from megarl.host.shell import named
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint, check_room
from megarl.models.hf import end_tokens
from megarl.text.display import escaped
from megarl.text.stdout import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOGETHER = 32  # sequences that the engine decodes at a time
PROMPTS = 256  # prompts per call of the engine
CACHE_MB = 4096  # KV cache of a CPU engine, unless one sequence needs more
MOST_NAMED = 1024  # tokens whose log-probs are written
RESPONSE = 512  # default of --max-tokens, if the model has room
OPTIONS = {  # configuration keys in the checks' messages, and the options that they stand for
    "model.path": "MODEL",
    "rollout.max_response_tokens": "--max-tokens",
    "max_response_tokens": "--max-tokens",
    "rollout.tp": "--tp",
    "data.chat": "MODEL",
    "data.template_args": "--template-args",
    "data.template": "--template",
    "FILE.path": "--file",
    "FILE.prompt_key": "--prompt-key",
    "samples_per_prompt": "--n",
    **{key: f"--{key.replace('_', '-')}" for key in ("tp", "top_p", "top_k", "min_p", "stop")},
}


@dataclass(frozen=True)
class GenerateJob:
    """A request that passed every check."""

    model: Path
    tokenizer: PreTrainedTokenizerBase
    format: PromptFormat
    prompts: list[Prompt]  # empty for a chat
    settings: RolloutSettings
    sampling: Sampling
    dtype: str
    gpu: bool
    top_logprobs: int | None  # log-probs of so many tokens are written at each token of the responses


def main(arguments: Sequence[str]) -> int:
    """Run the verb. Raises ConfigError for unusable input, RolloutError if the engine fails."""
    options = parser().parse_args(list(arguments))
    try:
        with naming_files("generate"):
            job = check(options)
    except ConfigError as error:
        raise ConfigError(_in_options(str(error))) from None
    if job.top_logprobs is not None:
        teach(job, job.top_logprobs, options.out)
        return 0
    with Speaker(job) as speaker:
        if options.chat:
            chat(speaker)
        else:
            answer(speaker, options.out)
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the verb's arguments."""
    top = argparse.ArgumentParser(
        prog="megarl generate",
        usage="megarl generate MODEL [PROMPT | --file FILE | --chat] [options]",
        description="Asks a model in a Hugging Face directory, through the engine that training samples with. A prompt goes through "
        "the model's chat template if it has one. What a terminal would obey is shown as \\x1b and the like.",
    )
    top.add_argument("model", type=Path, metavar="MODEL", help="a Hugging Face directory")
    top.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt")
    top.add_argument("--file", type=Path, metavar="FILE", help="prompts: .jsonl, .parquet, or a directory of `datasets`")
    top.add_argument("--prompt-key", default="prompt", metavar="NAME", help="the column of the prompts (default: prompt)")
    top.add_argument("--chat", action="store_true", help="a conversation, one line per turn; /new starts over, Ctrl-D ends")
    top.add_argument("--system", metavar="TEXT", help="a system message before each prompt")
    top.add_argument("--template-args", metavar="JSON", help='arguments of the chat template, such as {"enable_thinking": false}')
    top.add_argument("--template", metavar="TEXT", help='instead of the chat template, such as "Question: {prompt} Answer:"')
    top.add_argument("--n", type=int, default=1, metavar="N", help="responses per prompt (default 1)")
    top.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: always the most likely token (default 1)")
    top.add_argument("--top-p", type=float, metavar="P", help="sample from the most likely tokens that together have probability P")
    top.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    top.add_argument("--min-p", type=float, metavar="P", help="sample from tokens at least P times as likely as the most likely one")
    top.add_argument("--stop", action="append", metavar="TEXT", help="ends a response; may be given several times")
    top.add_argument("--max-tokens", type=int, metavar="N", help=f"longest response ({RESPONSE}, or what the model has room for)")
    top.add_argument("--seed", type=int, default=1, metavar="N", help="seed for sampling (default 1)")
    top.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="dtype of the weights (default: bfloat16 on GPUs, float32 on the CPU)"
    )
    top.add_argument("--tp", type=int, default=1, metavar="N", help="GPUs that share the model (default 1)")
    top.add_argument("--cpu", action="store_true", help="run on the CPU even if there are GPUs")
    top.add_argument("--out", type=Path, metavar="FILE", help="write JSON lines to this file, which must not exist")
    top.add_argument(
        "--top-logprobs", type=int, metavar="K", help="with --out: write tokens and the log-probs of the K likeliest, for sft.distillation"
    )
    return top


def check(options: argparse.Namespace) -> GenerateJob:
    """Check everything that can be checked before the engine starts. Raises ConfigError, in the terms of a configuration."""
    if sum((options.prompt is not None, options.file is not None, options.chat)) != 1:
        raise ConfigError("generate: give a PROMPT, --file FILE or --chat")
    if options.out is not None and (options.chat or options.out.exists() or not options.out.absolute().parent.is_dir()):
        why = "a chat is not written" if options.chat else "already exists" if options.out.exists() else "its directory does not exist"
        raise ConfigError(f"--out {options.out}: {why}")
    if options.chat and options.n != 1:
        raise ConfigError(f"--n {options.n}: a chat has one response a turn")
    if options.chat and options.template is not None:
        raise ConfigError("--template: a chat goes through the model's chat template")
    if not 0 <= options.temperature < math.inf:
        raise ConfigError(f"--temperature {options.temperature:g}: must be 0 or more")
    if options.top_k is not None and abs(options.top_k) >= 1 << 31:
        raise ConfigError(f"--top-k {options.top_k}: an integer of {options.top_k.bit_length()} bits, more than 31")
    if not 0 <= options.seed < 1 << 32:
        raise ConfigError(f"--seed {options.seed}: must be 0 or more, and below 2^32")
    for option, texts in (
        ("PROMPT", [options.prompt]),
        ("--system", [options.system]),
        ("--template", [options.template]),
        ("--template-args", [options.template_args]),
        ("--stop", options.stop),
    ):
        if any("\ud800" <= letter <= "\udfff" for text in texts or () for letter in text or ""):  # stand for bytes that are not UTF-8
            raise ConfigError(f"{option}: is not UTF-8")
    gpu = gpus_here() > 0 and not options.cpu
    if options.tp > 1 and gpu and options.tp > gpus_here():
        raise ConfigError(f"--tp {options.tp}: this machine has {gpus_here()} GPUs")
    model = options.model.absolute()
    description, tokenizer = check_checkpoint(model, mtp="drop"), load_tokenizer(model)
    if options.top_logprobs is not None:
        most = min(MOST_NAMED, len(tokenizer))
        if options.out is None or not 1 <= options.top_logprobs <= most:
            raise ConfigError(f"--top-logprobs {options.top_logprobs}: needs --out, and 1 to {most} tokens")
    if options.system is not None and (options.template is not None or not tokenizer.chat_template):
        raise ConfigError("--system: is part of a chat, and the prompt goes through no chat template")
    if options.chat and not tokenizer.chat_template:
        raise ConfigError("--chat: the tokenizer has no chat template")
    room, form = description.room, _format(options, tokenizer)
    reader = reader_of(ModelSettings(path=model), room - 1, "the model's room")
    renderer = Renderer(tokenizer, form, room - 1, "the model's room", reader=reader)
    prompts = renderer.all(iter(()) if options.chat else _rows(options, reader))
    renderer.intake.tell(len(prompts), "PROMPT" if options.file is None else f"--file {options.file}", "")
    longest = max((len(prompt.ids) for prompt in prompts), default=room // 2)
    more = int(options.top_logprobs is not None)  # to score tokens, the engine has to have room for one after them
    response = min(RESPONSE, room - longest - more) if options.max_tokens is None else options.max_tokens
    if options.chat:
        longest = room - response
    check_room(description, max(1, longest) + response + more, f"--max-tokens {response} with its prompt")
    if more and (seeing := next((prompt for prompt in prompts if prompt.images), None)) is not None:
        raise ConfigError(f"--top-logprobs: {seeing.name} has images, which rows of tokens do not hold")
    settings = _settings(options, longest, response + more, min(TOGETHER, options.n * max(1, len(prompts))))
    dtype = options.dtype or ("bfloat16" if gpu else "float32")
    if not gpu:
        settings = engine_type(settings).with_cache(description, dtype, settings, CACHE_MB)
    check_engine(description, dtype, settings, gpu=gpu)
    sampling = Sampling(options.n, options.temperature, response, options.seed).within(settings)
    return GenerateJob(model, tokenizer, form, prompts, settings, sampling, dtype, gpu, options.top_logprobs)


def _format(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> PromptFormat:
    through_chat = options.template is None and bool(tokenizer.chat_template)
    arguments = mapping(options.template_args, "--template-args")
    if arguments and not through_chat:
        raise ConfigError("--template-args: the prompt goes through no chat template")
    return PromptFormat(chat=through_chat, template=options.template or "{prompt}", system=options.system, template_args=arguments)


def _settings(options: argparse.Namespace, longest: int, response: int, together: int) -> RolloutSettings:
    names = ("tp", "top_p", "top_k", "min_p", "stop")
    tree = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    lengths = {"max_prompt_tokens": longest, "max_response_tokens": response, "samples_per_prompt": options.n}
    try:
        return RolloutSettings.model_validate({**tree, **lengths, "max_num_seqs": max(1, together)})
    except ValidationError as error:
        faults = [f"{OPTIONS[str(one['loc'][0])]}: {one['msg']} (got {one['input']!r})" for one in error.errors()]
        raise ConfigError("\n".join(faults)) from None


def _in_options(message: str) -> str:
    """Rephrase an error message in the terms of the command line."""
    keys = "|".join(re.escape(key) for key in OPTIONS if "." in key)
    return re.sub(rf"\b({keys})(=?)", lambda found: OPTIONS[found[1]] + (" " if found[2] else ""), message)


def _rows(options: argparse.Namespace, reader: ImageReader | None) -> Iterator[Row]:
    if options.prompt is not None:
        yield Row("PROMPT", checked(options.prompt, "PROMPT"), "", {})
        return
    place, filled = "", options.file.suffix != ".jsonl"
    for place, row in read_rows(options.file, "FILE"):
        prompt, images = seen(
            at(row, options.prompt_key, place, "FILE.prompt_key"), row, FileSource(type="file", path=options.file), place, reader
        )
        yield Row(place, checked(prompt, place, filled), "", {}, tools_of(row, place, filled), arguments_of(row, place), images)
    if not place:
        raise ConfigError(f"--file: {options.file} holds no prompts")


class Speaker:
    """An engine in this process with the job's model, as a context manager. Its stderr is shown only if it fails.

    Args:
        job: the request.
        scoring: the engine only scores given tokens, as this says.
    """

    def __init__(self, job: GenerateJob, scoring: Scoring | None = None) -> None:
        self.job, self._scoring = job, scoring
        self._runner, self._log = asyncio.Runner(), os.memfd_create("stderr")
        self._engine = engine_type(job.settings)("the engine")
        self._responder = Responder(self._engine, job.settings.timeout_s)

    def __enter__(self) -> Speaker:
        os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))  # the engine has the cores to itself
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the engine's process is forked, which the tokenizer would warn about
        job, self._stderr = self.job, os.dup(2)
        if (unused := named(engine_type(job.settings).overruled(os.environ, gpu=job.gpu))) is not None:
            print(f"megarl: {unused}", file=sys.stderr)
        print(f"megarl: starting an engine with {job.model} ...", file=sys.stderr, flush=True)
        os.dup2(self._log, 2)
        setup = Setup(job.model, job.dtype, job.settings, job.sampling.seed, gpu=job.gpu, scoring=self._scoring)
        try:
            self._runner.run(self._engine.start(setup))
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._runner.run(self._engine.close())
        finally:
            self._runner.close()
            os.dup2(self._stderr, 2)
            os.close(self._stderr)
            if isinstance(error, RolloutError):
                sys.stderr.write(os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace"))
            os.close(self._log)

    def responses(self, prompts: Sequence[Prompt], seed: int | None = None) -> list[list[dict[str, Any]]]:
        """Return `sampling.n` responses to each prompt, each with text, finish_reason and length in tokens."""
        job, sampling = self.job, self.job.sampling if seed is None else replace(self.job.sampling, seed=seed)
        ends = end_tokens(job.model)
        return [
            [
                {
                    "response": text_of(sample, sampling, job.tokenizer, ends),
                    "finish_reason": sample.finish_reason,
                    "length": len(sample.tokens) - sample.prompt_length,
                }
                for sample in one.samples
            ]
            for one in self.samples(prompts, sampling)
        ]

    def samples(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Generated]:
        """Return the responses to each prompt, as tokens."""
        token_prompts = [TokenPrompt(prompt.id, prompt.tokens, images=prompt.images) for prompt in prompts]
        return self._runner.run(generate(self._responder, token_prompts, sampling, self.job.settings.timeout_s))

    def scores(self, samples: Sequence[Sample]) -> list[TokenScores]:
        """Return the model's log-probs at all tokens of prompts and responses but the first, as `scoring` says."""
        return self._runner.run(self._engine.score([Text(sample.tokens.tolist()) for sample in samples], self.job.settings.timeout_s))


def answer(speaker: Speaker, out: Path | None) -> None:
    """Print the responses to all prompts, or write them as JSON lines; a file is complete or absent."""
    if out is None:
        for _ in _answered(speaker, None):
            pass
        return
    with _whole(out) as file:
        responses = sum(1 for _ in _answered(speaker, file))
    say(f"megarl: wrote {responses:,} responses to {len(speaker.job.prompts):,} prompts into {out}")


def teach(job: GenerateJob, count: int, out: Path) -> None:
    """Write the responses with the model's likeliest tokens at each place, as `data.train.type=taught` reads them.

    Args:
        job: the request.
        count: the number of tokens at each place.
        out: the file; it is complete or absent.
    """
    from megarl.engines.teacher import Columns, named  # and with it Ray

    vocabulary = len(job.tokenizer)
    with _whole(out) as file:
        with Speaker(job) as speaker:
            parts = [job.prompts[first : first + PROMPTS] for first in range(0, len(job.prompts), PROMPTS)]
            samples = [sample for part in parts for one in speaker.samples(part, job.sampling) for sample in one.samples]
        scoring = Scoring(named(count, ModelDescription.read(job.model).vocab, vocabulary), temperature=1.0)
        with Speaker(job, scoring) as teacher:
            for first in range(0, len(samples), PROMPTS):
                part = samples[first : first + PROMPTS]
                for sample, scores in zip(part, teacher.scores(part), strict=True):
                    column = Columns(count, vocabulary).column(scores)[sample.prompt_length - 1 :]
                    file.write(json.dumps(taught_row(sample, column[:, :count], column[:, count : 2 * count])) + "\n")
    say(f"megarl: wrote {len(samples):,} responses to {len(job.prompts):,} prompts into {out}, with {count} log-probs a token")


def taught_row(sample: Sample, token_TK: np.ndarray, logp_TK: np.ndarray) -> dict[str, Any]:
    """Return the row of a response.

    Args:
        sample: the response.
        token_TK: the tokens that are named at each of its places.
        logp_TK: their log-probs.
    """
    prompt, response = np.split(sample.tokens, [sample.prompt_length])
    logps = [[round(float(logp), 6) for logp in logp_K] for logp_K in np.minimum(logp_TK, 0.0)]
    columns = {"prompt_ids": prompt.tolist(), "response_ids": response.tolist(), "top_ids": token_TK.astype(int).tolist()}
    return {**columns, "top_logps": logps, "finish_reason": sample.finish_reason}


@contextmanager
def _whole(out: Path) -> Iterator[TextIO]:
    """A file that is there once it is complete."""
    partial = out.with_name(f"{out.name}.{secrets.token_hex(4)}.partial")
    try:
        with naming_files("generate"):
            file = partial.open("x", encoding="utf-8")
        with file:
            yield file
        os.replace(partial, out)
    finally:
        partial.unlink(missing_ok=True)


def _answered(speaker: Speaker, file: TextIO | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each response, after writing or printing it."""
    prompts, n = speaker.job.prompts, speaker.job.sampling.n
    for first in range(0, len(prompts), PROMPTS):
        part = prompts[first : first + PROMPTS]
        for prompt, responses in zip(part, speaker.responses(part), strict=True):
            for number, response in enumerate(responses):
                row = {"prompt": prompt.shown, "sample": number, **response}
                if file is not None:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                elif len(prompts) == n == 1:
                    say(escaped(response["response"]))
                else:
                    say(*_shown(prompt, row, n))
                yield row


def _shown(prompt: Prompt, row: dict[str, Any], n: int) -> Iterator[str]:
    ending = "ended by itself" if row["finish_reason"] == "stop" else "cut by the length limit"
    which = f", response {row['sample'] + 1} of {n}" if n > 1 else ""
    yield f"--- prompt {prompt.id + 1}{which}: {row['length']} tokens, {ending}"
    yield from _spoken("prompt", prompt.text)
    yield from _spoken("response", row["response"])


def _spoken(who: str, text: str) -> Iterator[str]:
    for number, line in enumerate(escaped(text).split("\n")):
        yield f"{who if number == 0 else '':>8} | {line}"


def chat(speaker: Speaker) -> None:
    """Chat with the model until the input ends."""
    job, messages = speaker.job, list[Message]()
    renderer = Renderer(job.tokenizer, job.format, job.settings.max_prompt_tokens, "the model's room")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # input that is not UTF-8
    for turn in count():
        try:
            line = input(f"{'you':>8} | ")
        except EOFError:
            say("")
            return
        if line.strip() == "/new":
            messages = []
        if not line.strip() or line.strip() == "/new":
            continue
        messages.append({"role": "user", "content": line})
        try:
            [prompt] = renderer.prompts([Row("chat", list(messages), "", {})], [0])
        except ConfigError as error:
            messages.pop()
            say(f"megarl: {escaped(str(error))} (/new starts over)")
            continue
        [[response]] = speaker.responses([prompt], job.sampling.seed + turn)
        messages.append({"role": "assistant", "content": response["response"]})
        cut = " [cut by --max-tokens]" if response["finish_reason"] == "length" else ""
        say(*_spoken("model", response["response"] + cut))
