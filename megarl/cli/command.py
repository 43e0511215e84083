"""The command line: `megarl VERB CONFIG.yaml [a.b=c ...]`. Thin: nothing heavy is imported before a verb is chosen."""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from megarl import __version__
from megarl.host import termination
from megarl.imports import add_current_folder, find, gc_paused
from megarl.text.display import escaped, one_line
from megarl.text.stdout import say
from megarl.verbs import TOOLS, VERBS, Verb

FAULT, FAILURE, INTERRUPTED = 2, 1, 130
LOOKED_AT = 2000  # items that --check draws from a generated source
MAX_SHOWN = 1500  # longest error line in characters: it may quote user input


def parser() -> argparse.ArgumentParser:
    """The parser of the command line without a verb's arguments; its help lists all verbs."""
    verbs = "\n".join(f"  {name:8} {verb.help}" for name, verb in (VERBS | TOOLS).items())
    top = argparse.ArgumentParser(
        prog="megarl",
        usage="megarl VERB ...",
        description="Reinforcement learning for large MoE language models.\n\nverbs:\n" + verbs,
        epilog="megarl VERB --help describes one verb.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("verb", choices=VERBS | TOOLS, metavar="VERB", help=argparse.SUPPRESS)
    top.add_argument("--version", action="version", version=f"megarl {__version__}")
    return top


def verb_parser(name: str) -> argparse.ArgumentParser:
    """The parser of the arguments of a verb that takes a configuration."""
    verb = VERBS[name]
    top = argparse.ArgumentParser(
        prog=f"megarl {name}",
        usage=f"megarl {name} CONFIG.yaml [a.b=c ...] [--check]",
        description=f"{verb.help[0].upper()}{verb.help[1:]}. Writes to runs/<name>/: {verb.leaves}.",
        epilog=f"megarl config {name} lists the keys: accepted values, defaults, meaning.",
    )
    top.add_argument("config", type=Path, metavar="CONFIG.yaml", help="the configuration; with `base: other.yaml` it extends another")
    top.add_argument(
        "overrides", nargs="*", default=[], metavar="a.b=c", help="optional: a configuration value, as YAML, such as train.steps=5"
    )
    top.add_argument("--check", action="store_true", help="optional: run all checks and stop before any process starts")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb.

    Returns 0 on success, 2 for bad input (a line per fault on stderr), 130 when interrupted, 143, 129 or 138 after SIGTERM, SIGHUP or
    SIGUSR1, and 1 for any other failure.
    """
    status = _main(list(sys.argv[1:] if arguments is None else arguments))
    _leave_lost_session(status)
    return status


def _main(arguments: list[str]) -> int:
    termination.install()
    add_current_folder()
    if lost := [one for one in arguments if one.startswith("--") and one.endswith("=--")]:  # which argparse turns into an empty list
        return _refused(f"{lost[0]}: -- is not a valid option value")
    try:
        with termination.raised():
            if arguments and arguments[0] in TOOLS:
                tool = TOOLS[arguments[0]]
                return _guarded(lambda: find(tool.run)(arguments[1:]), arguments[0] if tool.reads else None)
            if not arguments or arguments[0] not in VERBS:
                parser().parse_args(arguments[:1])  # prints help, the version or the error, and exits
            given = verb_parser(arguments[0]).parse_intermixed_args(arguments[1:])
            return _guarded(
                lambda: _run(VERBS[arguments[0]], given.config, given.overrides, given.check), arguments[0] if given.check else None
            )
    except KeyboardInterrupt:
        print("megarl: interrupted", file=sys.stderr)
        return INTERRUPTED
    except termination.Terminated as stop:
        print(f"megarl: stopped by {stop.message}", file=sys.stderr)
        return int(stop.code or 0)


def _run(verb: Verb, path: Path, overrides: list[str], check: bool) -> int:
    with gc_paused():
        from megarl.config import load
    root: Any = find(verb.config)
    config = load(path, overrides, root)
    with gc_paused():
        work = find(verb.check if check else verb.run)
    if not check:
        work(config)
        return 0
    with gc_paused():
        from megarl.data.gym import first_items
        from megarl.host.http_client import elsewhere
    # A run that resumes must have as many prompts as its checkpoint says, so all of them are counted.
    resumes = (config.directory / "checkpoints").is_dir()
    with first_items(sys.maxsize if resumes else LOOKED_AT) as look, elsewhere():
        work(config)
        warnings = find("megarl.checks.memory:warnings")(config)
    for warning in warnings:
        say(f"megarl: warning: {warning}")
    say(f"megarl: {path} passes every check{f' (of generated prompts the first {LOOKED_AT:,} were drawn)' if look.cut else ''}")
    return 0


def _guarded(call: Callable[[], int], reader: str | None) -> int:
    """Return the exit status of call(), or the one for what it raises.

    Args:
        call: the work.
        reader: the verb, if its system errors are about files that its arguments name; None if processes run.
    """
    from megarl.errors import ConfigError, Stopped, naming_files

    try:
        with nullcontext() if reader is None else naming_files(reader):
            return call()
    except ConfigError as error:
        return _refused(str(error))
    except Exception as error:
        if not isinstance(error, Stopped):
            traceback.print_exc()
        print(f"megarl: failed: {type(error).__name__}: {one_line(str(error))}", file=sys.stderr)
        return FAILURE


def _leave_lost_session(status: int) -> None:
    """End this process at once if its Ray session is lost: at the interpreter's exit, Ray would wait for what does not answer."""
    server = sys.modules.get("megarl.cluster.server")
    if server is not None and server.loss() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _refused(faults: str) -> int:
    """Print a line per fault and return the exit status. Lines are escaped, since they may quote files that others made."""
    for line in faults.splitlines():
        print(f"megarl: error: {escaped(line):.{MAX_SHOWN}}", file=sys.stderr)
    return FAULT


if __name__ == "__main__":
    sys.exit(main())
