"""Import modules of transformers without what makes it slow. Separate from megarl/imports.py, since scoring processes do not need it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from importlib import metadata
from typing import Any

from megarl.imports import parts_alone


class Distributions(Mapping[str, list[str]]):
    """`importlib.metadata.packages_distributions()`, read on demand, and read in full only for a package without a distribution of its
    name."""

    def __getitem__(self, package: str) -> list[str]:
        try:
            return [metadata.distribution(package).metadata["Name"]]
        except metadata.PackageNotFoundError:
            return self._all[package]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> Mapping[str, list[str]]:
        return _of_all()


_of_all = metadata.packages_distributions


@contextmanager
def light_transformers() -> Iterator[None]:
    """Speed up a block that imports modules of transformers. Its `__init__`, which reads the source of 1,500 models for half a second, does
    not run, and the files of all distributions, which transformers/utils/import_utils.py:51 takes 0.2 s to read just to look up torch, are
    not read."""
    read: Any = metadata.packages_distributions
    metadata.packages_distributions = Distributions
    try:
        with parts_alone("transformers"):
            yield
    finally:
        metadata.packages_distributions = read
