"""Software tasks, and how the rows of data sets name them."""

import io
import json
import posixpath
import re
import shlex
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = ".megarl"  # a folder for what a task needs and its repository does not have
TESTBED = "/testbed"  # where the images of SWE-bench, SWE-Gym and SWE-smith have the repository
CONDA = "export PATH=/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:$PATH"  # what `conda activate testbed` changes
PATCHED = re.compile(r"^(?:---|\+\+\+) [ab]/(.+?)\s*$", re.MULTILINE)
FOLDER_BYTES = 1 << 29


class BadTask(ValueError):
    """A row does not name a task; the message says why."""


@dataclass(frozen=True)
class Task:
    """A software task. Paths are relative to the task's directory."""

    test: str  # the command whose exit status 0 means that the task is solved
    image: str | None = None
    directory: str | None = None  # where the image has the task; None: the folder and files are laid somewhere
    folder: Path | None = None  # on this machine; its contents are laid into the directory
    files: Mapping[str, str] = field(default_factory=dict)  # texts, laid over the folder
    setup: str = ""  # the command that prepares each container
    shell: str = ""  # a command before each other one, such as what activates an environment
    hidden: Sequence[str] = ()  # files and folders that the model does not see
    kept: Sequence[str] = ()  # those that it sees, and that are as they were when the tests run
    tests: Mapping[str, str] = field(default_factory=dict)  # texts that are there only when the tests run

    def archive(self) -> bytes:
        """Return the folder and the files, as a tar file. Raises BadTask if the folder cannot be read."""
        packed = io.BytesIO()
        try:
            with tarfile.open(fileobj=packed, mode="w") as archive:
                if self.folder is not None:
                    archive.add(self.folder, arcname=".", filter=_nobody)
                for path, text in self.files.items():
                    entry = tarfile.TarInfo(path)
                    entry.size, entry.mode = len(data := text.encode()), 0o755 if text.startswith("#!") else 0o644
                    archive.addfile(entry, io.BytesIO(data))
        except OSError as error:
            raise BadTask(f"folder: {self.folder}: {error.strerror}") from None
        if packed.tell() > FOLDER_BYTES:
            raise BadTask(f"folder: {self.folder}: {packed.tell()} bytes, more than {FOLDER_BYTES}")
        return packed.getvalue()


def _nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def own(row: Mapping[str, Any]) -> Task:
    """Read megarl's own columns, named as the fields of Task; `folder` is relative to the current folder. Raises BadTask."""
    texts = {name: _text(row, name) for name in ("test", "image", "directory", "folder", "setup", "shell")}
    if not texts["test"]:
        raise BadTask("test: the row has no command in this column")
    if texts["directory"] is not None and not texts["directory"].startswith("/"):
        raise BadTask(f"directory: {texts['directory']!r:.80} does not begin with a slash")
    if texts["directory"] is None and texts["folder"] is None and not row.get("files"):
        raise BadTask("folder: the row has neither a folder, nor files, nor an image's directory: there is nothing to repair")
    return Task(
        test=texts["test"],
        image=texts["image"],
        directory=texts["directory"],
        folder=None if texts["folder"] is None else Path(texts["folder"]),
        files=_files(row, "files"),
        setup=texts["setup"] or "",
        shell=texts["shell"] or "",
        hidden=_paths(row, "hidden"),
        kept=_paths(row, "kept"),
        tests=_files(row, "tests"),
    )


def swe_gym(row: Mapping[str, Any]) -> Task:
    """Read the columns of SWE-Gym: `test_patch` is applied before FAIL_TO_PASS and PASS_TO_PASS are run by pytest. Raises BadTask.

    The image is the row's `image_name`, if it has one, else the published one of its `instance_id`.
    """
    name, patch = _needed(row, "instance_id"), _needed(row, "test_patch")
    names = _names(row, "FAIL_TO_PASS") + _names(row, "PASS_TO_PASS")
    image = _text(row, "image_name") or f"docker.io/xingyaoww/sweb.eval.x86_64.{name.replace('__', '_s_')}:latest".lower()
    touched = sorted(set(PATCHED.findall(patch)))
    return Task(
        test=f"sh {HERE}/test.sh",
        image=image,
        directory=TESTBED,
        shell=CONDA,
        kept=_inside(touched),
        tests={f"{HERE}/test.patch": patch, f"{HERE}/test.sh": _pytest(names, f"git apply {HERE}/test.patch || exit 1\n")},
    )


def swe_smith(row: Mapping[str, Any]) -> Task:
    """Read the columns of SWE-smith: `patch` makes the fault, and the files of FAIL_TO_PASS are hidden. Raises BadTask."""
    patch, failing = _needed(row, "patch"), _names(row, "FAIL_TO_PASS")
    names = failing + _names(row, "PASS_TO_PASS")
    files = sorted({one.partition("::")[0] for one in names})
    hidden = sorted({one.partition("::")[0] for one in failing})
    return Task(
        test=f"sh {HERE}/test.sh",
        image=_needed(row, "image_name"),
        directory=TESTBED,
        files={f"{HERE}/fault.patch": patch},
        setup=f"git apply {HERE}/fault.patch && rm -r {HERE}",
        shell=CONDA,
        hidden=_inside(hidden),
        kept=_inside(files),
        tests={f"{HERE}/test.sh": _pytest(names)},
    )


ROWS: Mapping[str, Callable[[Mapping[str, Any]], Task]] = {"own": own, "swe_gym": swe_gym, "swe_smith": swe_smith}
ANSWERS: Mapping[str, str] = {"own": "test", "swe_gym": "instance_id", "swe_smith": "instance_id"}
"""The column that `answer_key` names, since a row of the data has to have an answer. It reaches an environment apart from the others."""


def _pytest(names: Sequence[str], before: str = "") -> str:
    """A script that runs tests by their names; pytest's exit status is 0 only if all of them pass, and 4 if one is not there."""
    return f"{before}exec python -m pytest -p no:cacheprovider -q {' '.join(map(shlex.quote, names))}\n"


def _text(row: Mapping[str, Any], name: str) -> str | None:
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise BadTask(f"{name}: {value!r:.80} ({type(value).__name__}) is not a text")
    return value or None


def _needed(row: Mapping[str, Any], name: str) -> str:
    value = _text(row, name)
    if value is None:
        raise BadTask(f"{name}: the row has no text in this column")
    return value


def _list(row: Mapping[str, Any], name: str) -> list[str]:
    value = row.get(name)
    if isinstance(value, str):  # SWE-bench has lists as JSON
        try:
            value = json.loads(value)
        except ValueError:
            value = [value]
    if value is None:
        return []
    if not isinstance(value, Sequence) or not all(isinstance(one, str) for one in value):
        raise BadTask(f"{name}: {value!r:.80} is not a list of texts")
    return list(value)


def _names(row: Mapping[str, Any], name: str) -> list[str]:
    names = _list(row, name)
    if name == "FAIL_TO_PASS" and not names:
        raise BadTask(f"{name}: the row names no test")
    if any(one.startswith("-") for one in names):
        raise BadTask(f"{name}: a test's name begins with a hyphen")
    return names


def _paths(row: Mapping[str, Any], name: str) -> list[str]:
    return _inside(_list(row, name), name)


def _files(row: Mapping[str, Any], name: str) -> dict[str, str]:
    value = row.get(name)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = "no JSON"
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(text is None or isinstance(text, str) for text in value.values()):
        raise BadTask(f"{name}: {value!r:.80} is not a dictionary of texts by their paths")
    texts = {path: text for path, text in value.items() if text is not None}  # Arrow fills the keys of other rows with nulls
    return dict(zip(_inside(texts, name), texts.values(), strict=True))


def _inside(paths: Sequence[str] | Mapping[str, str], name: str = "a patch") -> list[str]:
    """Normalise paths. Raises BadTask for one that leads out of the task's directory."""
    normal = [posixpath.normpath(path) for path in paths]
    for path in normal:
        if path.startswith(("/", "../", "-")) or path in ("..", "."):
            raise BadTask(f"{name}: {path!r:.80} is not a path inside the task's directory")
    return normal
