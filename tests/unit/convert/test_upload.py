"""`megarl convert megatron-to-hf --upload`: huggingface_hub's own upload, to a server on this machine; and the model card of a run."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from megarl.cli import main
from megarl.observe import card
from tests.unit.convert.converting import convert, refused

# huggingface_hub's own
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes/text content:DeprecationWarning")
TOKEN, REPOSITORY = "hf_of_nobody", "lab/tiny"
CONFIG = {
    "name": "lab/tiny run",
    "run_dir": "/home/somebody/runs",
    "seed": 3,
    "model": {"path": "/home/somebody/.cache/hub/models--Qwen--Qwen3-30B-A3B/snapshots/abc"},
    "cluster": {"address": "node17.inside"},
    "algorithm": {"type": "gspo", "clip_low": 0.0003},
    "data": {"chat": True, "train": {"type": "file", "path": "/data/secret/sums.jsonl"}},
    "reward": {"source": {"type": "service", "url": "http://node3.inside:8000"}},
}
ROWS = [
    {"step": 0, "actor/lr": 0.001},
    {"step": 0, "eval/heldout/greedy": 0.5, "timing_s/eval": 1.0},
    {"step": 7, "eval/heldout/greedy": 0.75},
]


class Hub(ThreadingHTTPServer):
    """As much of the hub as an upload needs: repositories in memory."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Requests)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files: dict[str, bytes] = {}
        self.blobs: dict[str, bytes] = {}
        self.private: bool | None = None  # None: there is no repository yet
        self.commits = 0
        self.fails_at: str | None = None  # part of an address


class _Requests(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *arguments: Any) -> None:
        pass

    def _say(self, body: Any = None, status: int = 200, **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def _stopped(self) -> bool:
        """Whether this request is refused: by a wrong token, or because the test wants it."""
        if "/blobs/" not in self.path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._say({"error": "Invalid username or password."}, 401)
        elif self.server.fails_at is not None and self.server.fails_at in self.path:
            self._say({"error": "the disk of the hub is full"}, 403)
        else:
            return False
        return True

    def do_GET(self) -> None:
        hub = self.server
        if self._stopped():
            return
        if self.path == "/api/whoami-v2":
            self._say({"type": "user", "name": "somebody", "orgs": [{"name": "lab"}]})
        elif self.path.startswith(f"/api/models/{REPOSITORY}"):
            if hub.private is None:
                self._say({"error": "Repository not found"}, 404, X_Error_Code="RepoNotFound")
            else:
                self._say({"id": REPOSITORY, "modelId": REPOSITORY, "private": hub.private, "tags": [], "siblings": []})
        elif self.path.startswith(f"/{REPOSITORY}/resolve/main/"):
            data = hub.files.get(self.path.rpartition("/main/")[2])
            if data is None:
                self._say({}, 404, X_Error_Code="EntryNotFound")
            else:
                self._say(data, ETag=f'"{sha256(data).hexdigest()}"', X_Repo_Commit="c" * 40)
        else:
            self._say({"error": self.path}, 404)

    do_HEAD = do_GET

    def do_PUT(self) -> None:
        self.server.blobs[self.path.rpartition("/")[2]] = self._body()
        self._say(b"")

    def do_POST(self) -> None:
        hub, body = self.server, self._body()
        if self._stopped():
            return
        if self.path == "/api/repos/create":
            asked = json.loads(body)
            if hub.private is None:
                hub.private = asked["visibility"] == "private"
                self._say({"url": f"{hub.url}/{REPOSITORY}"})
            else:
                self._say({"error": "You already created this model repo", "url": f"{hub.url}/{REPOSITORY}"}, 409)
        elif self.path.endswith("/preupload/main"):
            modes = [(one["path"], one["path"].endswith(".safetensors")) for one in json.loads(body)["files"]]
            files = [{"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False} for path, large in modes]
            self._say({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            asked = json.loads(body)["objects"]
            objects = [
                one if one["oid"] in hub.blobs else {**one, "actions": {"upload": {"href": f"{hub.url}/blobs/{one['oid']}"}}}
                for one in asked
            ]
            self._say({"transfer": "basic", "objects": objects})
        elif self.path.endswith("/commit/main"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
                elif line["key"] == "lfsFile":
                    hub.files[line["value"]["path"]] = hub.blobs[line["value"]["oid"]]
            hub.commits += 1
            self._say({"success": True, "commitUrl": f"{hub.url}/{REPOSITORY}/commit/{'c' * 40}", "commitOid": "c" * 40})
        elif self.path.endswith("/validate-yaml"):
            self._say({"errors": [], "warnings": []})
        else:
            self._say({"error": self.path}, 404)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def run(models: dict[str, Path], tmp_path: Path) -> Path:
    """A run's directory with a step, as far as conversion reads it."""
    directory = tmp_path / "run"
    convert("hf-to-megatron", models["qwen3_moe"], directory / "checkpoints")
    (directory / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    (directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS))
    return directory


def arguments(run: Path, out: Path, *options: str) -> list[str]:
    return ["convert", "megatron-to-hf", str(run), str(out), "--upload", REPOSITORY, *options]


def upload(run: Path, out: Path, **environment: str) -> str:
    """Run the command in a process of its own, since huggingface_hub reads its environment as it is imported. Return what it says."""
    known = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING_FACE", "TRANSFORMERS"))}
    given = {"HF_TOKEN": TOKEN, "HF_HOME": str(run / "hf")} | environment
    command = [sys.executable, "-m", "megarl.cli", *arguments(run, out)]
    return subprocess.run(command, env=known | given, capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.fixture
def here(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Lets this process find the hub."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    return monkeypatch


def test_a_run_is_uploaded_into_a_private_repository_with_a_card(hub: Hub, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert f"{hub.url}/{REPOSITORY}" in upload(run, out, HF_ENDPOINT=hub.url) and hub.private and hub.commits == 1
    assert hub.files == {file.name: file.read_bytes() for file in out.iterdir() if file.name != "conversion.json"}
    assert "model.safetensors" in hub.files and card.own(hub.files["README.md"].decode())


def test_an_upload_goes_on_and_leaves_a_card_that_its_readers_have_changed(
    hub: Hub, run: Path, tmp_path: Path, here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    hub.fails_at = "/commit/"
    line = refused(capsys, *arguments(run, out)[1:])
    assert line.startswith(f"megarl: error: convert: --upload {REPOSITORY}: 403 Forbidden") and hub.commits == 0
    written = (out / "model.safetensors").stat().st_mtime_ns

    hub.fails_at = None
    assert main(arguments(run, out)) == 0 and hub.commits == 1
    assert (out / "model.safetensors").stat().st_mtime_ns == written, "converted twice"

    (run / "metrics.jsonl").write_text(json.dumps({"step": 0, "eval/heldout/greedy": 0.25}) + "\n")
    shutil.rmtree(out)
    assert main(arguments(run, out)) == 0 and "| heldout/greedy | 0.25 |" in hub.files["README.md"].decode(), "megarl's own is replaced"

    theirs = hub.files["README.md"] = hub.files["README.md"].replace(b"Configuration", b"What we did")
    assert main(arguments(run, out)) == 0 and hub.files["README.md"] == theirs and hub.commits == 3


def test_an_upload_that_cannot_be_is_refused_before_anything_is_converted(
    hub: Hub, run: Path, tmp_path: Path, here: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    hub.private = False

    def check(words: str, *options: str) -> None:
        line = refused(capsys, *arguments(run, out, *options)[1:])
        assert words in line and not out.exists() and not hub.commits, line

    check("is public already (--public uploads to it all the same)")
    check("the token is of somebody, lab, not of strangers", "--upload", "strangers/tiny")
    check("expected ORG/NAME", "--upload", "tiny")
    with here.context() as changed:
        changed.setenv("HF_TOKEN", "hf_wrong")
        check("Invalid user token")
    with here.context() as changed:
        changed.delenv("HF_TOKEN")
        changed.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
        check("no token: set HF_TOKEN")
    with here.context() as changed:
        changed.setattr(constants, "HF_HUB_OFFLINE", True)
        check("offline, by HF_HUB_OFFLINE")
    with here.context() as changed:
        changed.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
        check("refused")
    assert main(arguments(run, out, "--public")) == 0 and hub.commits == 1 and hub.private is False


def test_a_card_says_what_trained_the_model_and_nothing_of_the_machines(run: Path, tmp_path: Path) -> None:
    convert("megatron-to-hf", run, tmp_path / "out")
    text = (tmp_path / "out" / card.CARD).read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["base_model"] == "Qwen/Qwen3-30B-A3B" and front["library_name"] == "transformers" and "gspo" in front["tags"]
    facts = front["megarl"]
    assert [facts[key] for key in ("algorithm", "steps", "seed", "evaluation")] == ["gspo", 0, 3, {"eval/heldout/greedy": 0.5}]
    assert facts["data"] == {"data.train": {"type": "file", "path": "sums.jsonl"}}
    assert "clip_low: 0.0003" in text and not any(word in text for word in ("somebody", "secret", "inside", "/data"))
    assert card.own(text) and not card.own(text.replace("gspo", "grpo")) and not card.own("# Our model\n")


def test_a_checkpoint_of_no_run_has_no_card(models: dict[str, Path], tmp_path: Path) -> None:
    convert("hf-to-megatron", models["qwen3_moe"], tmp_path / "steps")
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "out")
    assert not (tmp_path / "out" / card.CARD).exists()
