"""Runs megatron.core on a machine without CUDA, by an import hook that redirects its device names and nothing else.

Megatron names "cuda" in its sources (`torch.cuda.current_device()`, `device="cuda"`, `tensor.cuda()`, `"torch.cuda.FloatTensor"`,
`pin_memory=True`). The hook rewrites the syntax tree of `megatron.core.*` modules as they are imported: those names become their CPU
counterparts and `torch.cuda` becomes the small stand-in below. torch itself stays untouched, and so does every source file.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.abc
import importlib.machinery
import importlib.util
import marshal
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch

KERNELS = "megatron.core.transformer.moe.ops.paged_stash"  # which imports triton whether or not it is there (line 4)
STAND_IN = "__megarl_cpu__"  # the global through which a rewritten module reaches the stand-in
_NAMED = (b"cuda", b"pin_memory", b"@torch.compile")  # a source without these bytes needs no rewriting


class _Stream:
    """All CPU work runs on the caller's thread, in order: there is one stream and nothing to wait for."""

    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...
    def record_event(self, *_: Any) -> _Event:
        return _Event()


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def record(self, *_: Any) -> None: ...
    def wait(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


@contextlib.contextmanager
def _stream(*_: Any) -> Iterator[None]:
    yield


def _nothing(*_: Any, **__: Any) -> None: ...


def _get_rng_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one would seed through torch.cuda again.
    torch.default_generator.manual_seed(seed)


class _CpuStandIn(ModuleType):
    """The module that megatron.core sees as `torch.cuda`: a CPU counterpart where there is one, torch's own attribute otherwise."""

    Stream, Event, stream = _Stream, _Event, staticmethod(_stream)
    synchronize = empty_cache = set_device = staticmethod(_nothing)
    nvtx = SimpleNamespace(range_push=_nothing, range_pop=_nothing, range=_stream)
    get_rng_state, set_rng_state = staticmethod(_get_rng_state), staticmethod(_set_rng_state)
    manual_seed = staticmethod(_manual_seed)
    random = SimpleNamespace(get_rng_state=_get_rng_state, set_rng_state=_set_rng_state)

    @staticmethod
    def current_device() -> torch.device:
        return torch.device("cpu")

    @staticmethod
    def current_stream(*_: Any) -> _Stream:
        return _Stream()

    default_stream = current_stream

    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 1  # dist_checkpointing's async writer computes the rank modulo this number (async_utils.py:565)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _Rewrite(ast.NodeTransformer):
    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if node.value == "cuda":
            return ast.copy_location(ast.Constant("cpu"), node)
        if isinstance(node.value, str) and node.value.startswith("torch.cuda.") and node.value.endswith("Tensor"):
            return ast.copy_location(ast.Constant(node.value.replace("torch.cuda.", "torch.")), node)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "cuda" and isinstance(node.value, ast.Name) and node.value.id == "torch":
            return ast.copy_location(ast.Name(STAND_IN, node.ctx), node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Drop `@torch.compile` (moe/router.py:918): to apply it imports torch's compiler, 3 s and 70 MB of each rank."""
        self.generic_visit(node)
        node.decorator_list = [decorator for decorator in node.decorator_list if ast.unparse(decorator) != "torch.compile"]
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "cuda":
            return node.func.value  # x.cuda(...) is x
        for keyword in node.keywords:
            if keyword.arg == "pin_memory":  # raises without CUDA (rope_utils.py:63)
                keyword.value = ast.copy_location(ast.Constant(False), keyword.value)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        source = self.get_data(path)
        if not any(name in source for name in _NAMED):
            return super().get_code(fullname)  # unchanged, with Python's own bytecode cache
        # Compiling the rewritten sources of all of Megatron takes a second, so the result is cached beside Python's bytecode, renamed.
        cache = importlib.util.cache_from_source(path, optimization="megarl")
        stamp = hashlib.sha256(importlib.util.MAGIC_NUMBER + _own_source() + source).digest()
        code = _read(cache, stamp)
        if code is None:
            tree = ast.fix_missing_locations(_Rewrite().visit(ast.parse(source, path)))
            code = compile(tree, path, "exec", dont_inherit=True)
            _write(cache, stamp + marshal.dumps(code))
        return code

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[STAND_IN] = _CpuStandIn(STAND_IN)
        super().exec_module(module)
        if module.__name__ == "megatron.core.jit":
            # Upstream's own switch: its `jit_fuser` is torch.compile, which here costs one run of a C++ compiler per small function.
            module.disable_jit_fuser()


def without_kernels() -> None:
    """Where there is no triton, put a module in the place of `KERNELS` with what moe/paged_stash.py:12 imports. On a CPU none is called."""
    if importlib.util.find_spec("triton") is None:
        module = ModuleType(KERNELS)
        vars(module).update(GLOBAL_BLOCK_SIZE=None, paged_stash_copy_kernel=None, paged_stash_pop_kernel=None)
        sys.modules[KERNELS] = module


@functools.cache
def _own_source() -> bytes:
    return Path(__file__).read_bytes()


def _read(cache: str, stamp: bytes) -> CodeType | None:
    try:
        data = Path(cache).read_bytes()
    except OSError:
        return None
    return marshal.loads(data[len(stamp) :]) if data.startswith(stamp) else None


def _write(cache: str, data: bytes) -> None:
    """Write the cache file atomically, since other ranks import at the same time. A read-only installation has no cache."""
    with contextlib.suppress(OSError):
        part = Path(f"{cache}.{os.getpid()}")
        part.parent.mkdir(exist_ok=True)
        part.write_bytes(data)
        part.replace(cache)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "megatron.core" and not fullname.startswith("megatron.core."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Install the hook before Python's own finders, once. Megatron must not have been imported yet."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    assert "megatron.core" not in sys.modules, "megatron.core was imported before megarl.parallel.backend.choose()"
    without_kernels()
    sys.meta_path.insert(0, _Finder())
