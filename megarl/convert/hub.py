"""Upload a converted model to a hub of models, by huggingface_hub: huggingface.co, or the one that HF_ENDPOINT names."""

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.errors import ConfigError
from megarl.models.hf import CONVERSION
from megarl.observe import card
from megarl.text.display import one_line

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class Upload:
    """An upload to a repository, checked before any work: name, network, token and right to write.

    Args:
        name: ORG/NAME.
        public: create a public repository, or write to one. Otherwise a new one is private, and a public one is refused.

    Raises:
        ConfigError: the upload is not possible.
    """

    def __init__(self, name: str, *, public: bool) -> None:
        self.name, self._public = name, public
        if not _NAME.fullmatch(name):
            raise ConfigError(f"convert: --upload {name!r}: expected ORG/NAME")
        from huggingface_hub import HfApi, constants, get_token

        if constants.HF_HUB_OFFLINE:
            raise ConfigError(f"convert: --upload {name}: offline, by HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE")
        if get_token() is None:
            raise ConfigError(f"convert: --upload {name}: no token: set HF_TOKEN, or run `hf auth login`")
        self._hub: HfApi = HfApi()
        with self._refusals():
            self._check()

    def _check(self) -> None:
        from huggingface_hub.errors import RepositoryNotFoundError

        user = self._hub.whoami()
        owners = [user["name"], *(one["name"] for one in user.get("orgs", []))]
        owner = self.name.partition("/")[0]
        if owner not in owners:
            raise ConfigError(f"convert: --upload {self.name}: the token is of {', '.join(owners)}, not of {owner}")
        try:
            public = not self._hub.model_info(self.name).private
        except RepositoryNotFoundError:
            return
        if public and not self._public:
            raise ConfigError(f"convert: --upload {self.name}: is public already (--public uploads to it all the same)")

    def run(self, directory: Path) -> str:
        """Upload a directory; return the address of the repository. A card there that somebody has written or changed is kept.

        Left out is conversion.json, which names folders of this machine. An upload that was interrupted sends only what is missing.
        """
        with self._refusals():
            address = str(self._hub.create_repo(self.name, private=not self._public, exist_ok=True))
            left_out = [CONVERSION, *([card.CARD] if self._has_other_card() else [])]
            self._hub.upload_folder(
                repo_id=self.name, folder_path=directory, ignore_patterns=left_out, commit_message="Upload by megarl convert"
            )
        return address

    def _has_other_card(self) -> bool:
        if not self._hub.file_exists(self.name, card.CARD):
            return False
        with tempfile.TemporaryDirectory(prefix="megarl-card-") as folder:
            return not card.own(Path(self._hub.hf_hub_download(self.name, card.CARD, local_dir=folder)).read_text(encoding="utf-8"))

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Say in one line what a hub, or the network, has against it."""
        from huggingface_hub.errors import HTTPError  # httpx2's

        try:
            yield
        except (HTTPError, OSError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"convert: --upload {self.name}: {one_line(str(error))}") from None
