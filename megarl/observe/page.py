"""report.html: a run on one page that needs no network and runs no script. Whatever a model wrote is shown as plain text."""

import base64
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from megarl.observe import samples
from megarl.observe.summary import weights
from megarl.observe.thumbnails import Thumbnails
from megarl.text.display import escaped

# Steps and evaluations; samples of each; characters of a text; images of a sample.
MAX_FILES, MAX_SAMPLES, MAX_CHARS, MAX_IMAGES = 40, 16, 4000, 4
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; color: #1c1c1c; background: #fff }
h1, h2 { font-weight: 600; line-height: 1.2 } h2 { margin-top: 2em; border-bottom: 1px solid #ddd; padding-bottom: .2em }
table { border-collapse: collapse; margin: 1em 0 } td, th { text-align: left; padding: .25em 1em .25em 0; vertical-align: top }
th { border-bottom: 1px solid #bbb } td.n { text-align: right; font-variant-numeric: tabular-nums }
pre { background: #f6f6f4; padding: .7em; margin: .3em 0; white-space: pre-wrap; overflow-wrap: anywhere; font-size: 13px }
details { margin: .4em 0 } summary { cursor: pointer } details details { margin-left: 1.2em }
.alarm { border-left: 4px solid #c0392b; background: #fdf1ef; padding: .5em .9em; margin: .6em 0 }
.good { color: #2c6e2f } .bad { color: #a23b2a } img { max-width: 100% } .note { color: #666 }
"""


def write(run: Path) -> None:
    """Write the page of a run from the files in its directory; the page is complete or absent."""
    partial = run / ".report.html.partial"
    partial.write_text("\n".join(lines(run)) + "\n", encoding="utf-8")
    partial.replace(run / "report.html")


def lines(run: Path) -> Iterator[str]:
    """Yield the page piece by piece."""
    summary = json.loads((run / "summary.json").read_text())
    name = text(run.name)
    yield f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{name}</title>'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n<style>{STYLE}</style>\n</head>\n<body>\n<h1>{name}</h1>'
    duration = f"{sum(summary['wall_s'].values()):,.0f} s" + (f" in {summary['starts']} starts" if summary["starts"] > 1 else "")
    gpus = f", {summary['gpu_s'] / 3600:,.2f} GPU hours" if summary["gpu_s"] else ""
    yield f'<p class="note">{text(run)}: {text(summary["rl_steps"])} RL steps, {duration}{gpus}</p>'
    yield f'<p class="note">model {text(summary["model"])}, megarl at commit {text(summary["commit"] or "unknown")}</p>'
    yield from _alarms(summary["alarms"])
    yield from _evaluations(summary["evaluations"], summary["results"])
    if (picture := run / "report.png").is_file():
        yield "<h2>Curves</h2>"
        yield f'<img alt="curves of the run" src="data:image/png;base64,{base64.b64encode(picture.read_bytes()).decode()}">'
    yield from _samples(samples.files(run))
    yield "<h2>Time and memory</h2>"
    yield from _table(("phase", "seconds"), ((phase, f"{seconds:,.1f}") for phase, seconds in summary["wall_s"].items()))
    yield from _table(("process", "peak memory, MB"), ((kind, f"{size:,.0f}") for kind, size in summary["peak_rss_mb"].items()))
    yield "<h2>Configuration</h2>"
    yield f"<details><summary>config.yaml</summary><pre>{text((run / 'config.yaml').read_text())}</pre></details>"
    yield "<h2>Versions</h2>"
    yield from _table(("package", "version"), summary["versions"].items())
    yield "</body>\n</html>"


def text(value: object) -> str:
    """Escape a value as text of the page: no mark-up, no control characters, nothing that changes the writing direction."""
    return escape(escaped(str(value)))


def _alarms(alarms: Mapping[str, str]) -> Iterator[str]:
    yield "<h2>Alarms</h2>"
    if not alarms:
        yield '<p class="good">none</p>'
    for name, message in alarms.items():
        yield f'<div class="alarm"><b>{text(name)}</b><br>{text(message)}</div>'


def _evaluations(evaluations: Mapping[str, Any], results: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    if evaluations:
        yield "<h2>Evaluations</h2>"
        rows = (
            (
                one["set"],
                one["prompts"],
                f"{'pass rate' if one['rate'] else 'score'} {name}",
                weights(when, evaluation["step"]),
                _interval(estimate),
            )
            for when, evaluation in evaluations.items()
            for one in evaluation["results"]
            for name, estimate in one["estimates"].items()
        )
        yield from _table(("set", "prompts", "", "weights", "mean [95 %]"), rows)
    if results:
        yield "<h2>Held-out</h2>"
        yield from _table(("", "", ""), ((name, metric, f"{x:.4g}") for name, values in results.items() for metric, x in values.items()))


def _interval(estimate: Mapping[str, float]) -> str:
    return f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"


def _samples(files: Sequence[samples.File]) -> Iterator[str]:
    if not files:
        return
    selection = [files[index] for index in samples.spread(len(files), MAX_FILES)]
    left_out = f", {len(files) - len(selection)} files omitted (megarl samples shows them)" if len(selection) < len(files) else ""
    yield f'<h2>Samples</h2>\n<p class="note">newest first{left_out}</p>'
    thumbnails = Thumbnails()
    for file in selection:
        records = sorted(file.records(), key=lambda record: math.inf if record.reward is None else -record.reward)
        rewards = [record.reward for record in records if record.reward is not None]
        mean = f"mean reward {fmean(rewards):.3f}" if rewards else "no reward"
        kind = f"evaluation of {file.set}" if file.set else "training"
        yield f"<details><summary>step {file.step}, {text(kind)}: {len(records)} responses, {mean}</summary>"
        for index in samples.spread(len(records), MAX_SAMPLES):  # from the best to the worst
            yield from _sample(records[index], thumbnails)
        yield "</details>"


def _sample(record: samples.SampleRecord, thumbnails: Thumbnails) -> Iterator[str]:
    parts = "".join(f", {name} {value:g}" for name, value in record.parts.items())
    ending = record.ending if record.finish_reason == "stop" else f'<span class="bad">{record.ending}</span>'
    failed = "" if record.error is None else f'<p class="bad">{text(record.error)}</p>'
    about = text(f"{record.scored_as}{parts}, {record.length} tokens{', greedy' if record.greedy else ''}, ")
    yield f"<details><summary>{about}{ending}</summary>{failed}"
    for image in record.images[:MAX_IMAGES]:
        name, url = text(image.name), thumbnails.url(image)
        yield f'<span class="note">{name}</span>' if url is None else f'<img alt="{name}" src="{url}">'
    for name, content in (("prompt", record.question), ("answer", record.answer), ("response", record.response)):
        cut = content if len(content) <= MAX_CHARS else f"{content[: MAX_CHARS // 2]}\n...\n{content[-MAX_CHARS // 2 :]}"
        yield f'<span class="note">{name}</span><pre>{text(cut)}</pre>'
    yield "</details>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    yield "<table><tr>" + "".join(f"<th>{text(head)}</th>" for head in heads) + "</tr>"
    for row in rows:
        yield "<tr>" + "".join(f"<td>{text(cell)}</td>" for cell in row) + "</tr>"
    yield "</table>"
