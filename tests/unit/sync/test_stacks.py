"""Laws of stacks: tensors of one shape that travel, and are fingerprinted, as one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.sync import fingerprint
from megarl.sync.fingerprint import Fingerprinter, fingerprints, keys, rearranged_fingerprints
from megarl.sync.receive import BucketReceiver
from megarl.sync.send import Sender
from megarl.sync.wire import Bucket, Header, TensorName


def _experts(count: int, names: str = "e", shape: tuple[int, int] = (37, 53), seed: int = 0) -> tuple[list[str], Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [f"{names}.{index}" for index in range(count)], torch.randn(count, *shape, generator=generator)


def _received(stream: list[tuple[TensorName, Tensor]], capacity_mb: int) -> tuple[list[Header], dict[str, Tensor], int]:
    headers, found, receiver = list[Header](), dict[str, Tensor](), BucketReceiver(torch.device("cpu"))

    def announce(plain: dict[str, Any]) -> Callable[[], object]:
        header = Header.parse(plain)
        headers.append(header)
        assert [name for name, _ in receiver.receive_stacks([header])] == header.names
        found.update(receiver.receive([header]))
        return lambda: None

    sender = Sender("shm", workers=1, host="", bucket_mb=capacity_mb, timeout_s=10.0, device=torch.device("cpu"))
    try:
        return headers, found, sender.send(stream, announce).tensors
    finally:
        sender.close()


def test_a_stack_arrives_as_its_tensors_in_as_many_buckets_as_it_fills() -> None:
    names, stack = _experts(9, shape=(300, 500))  # 0.6 MB each: one to a bucket
    alone = torch.ones(7)
    headers, found, count = _received([("norm", alone), (names, stack.transpose(1, 2))], 1)
    assert count == 10 and [header.names for header in headers] == [["norm", names[:1]], *([[name]] for name in names[1:])]
    assert torch.equal(found["norm"], alone)
    assert all(torch.equal(found[name], matrix.t()) for name, matrix in zip(names, stack, strict=True))
    headers, found, _ = _received([("norm", alone), (names, stack)], 256)
    assert len(headers) == 1 and len(headers[0].names) == 2, "one entry for all of them"
    assert all(torch.equal(found[name], matrix) for name, matrix in zip(names, stack, strict=True))


def test_only_what_is_read_at_once_lies_in_the_senders_memory() -> None:
    stream: list[tuple[TensorName, Tensor]] = [("norm", torch.ones(7)), _experts(2), _experts(2, "f", seed=1)]
    receiver, later = BucketReceiver(torch.device("cpu")), dict[str, Tensor]()

    def announce(plain: dict[str, Any]) -> Callable[[], object]:
        stacks = receiver.receive_stacks([Header.parse(plain)], read_at_once=lambda name: name[0] == "f.0")
        later.update({name if isinstance(name, str) else name[0]: tensor for name, tensor in stacks})
        assert torch.equal(later["f.0"], stream[2][1])
        return lambda: None

    sender = Sender("shm", workers=1, host="", bucket_mb=1, timeout_s=10.0, device=torch.device("cpu"))
    sender.send(stream, announce)
    sender._buffers[0].bytes_B.zero_()
    assert torch.equal(later["norm"], stream[0][1]) and torch.equal(later["e.0"], stream[1][1])
    assert not later["f.0"].any(), "it has not been copied"
    sender.close()


def test_a_stack_with_another_number_of_names_is_refused() -> None:
    names, stack = _experts(3)
    bucket = Bucket(torch.zeros(1 << 16, dtype=torch.uint8))
    bucket.add(names, stack)
    with pytest.raises(ValueError, match="2 names of a stack of 3"):
        Header.parse(replace(bucket.header(), names=[names[:2]]).plain())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_stack_has_the_fingerprints_of_its_tensors(dtype: torch.dtype) -> None:
    names, stack = _experts(5)
    pair = torch.stack([stack, stack + 1], 1).to(dtype)  # as gate and up projections are exported: not contiguous
    together, apart = Fingerprinter(), Fingerprinter()
    together.add(names, pair[:, 1])
    for name, matrix in zip(names, pair[:, 1], strict=True):
        apart.add(name, matrix)
    assert together.digest() == apart.digest()
    with pytest.raises(ValueError, match=r"^e\.2 came twice"):
        together.add(names[2:3], stack[2:3])


def test_the_tensors_of_a_stack_that_are_not_finite_are_named() -> None:
    names, stack = _experts(5)
    stack[1, 3, 4], stack[4, 0, 0] = torch.nan, -torch.inf
    prints = Fingerprinter()
    prints.add(names, stack)
    with pytest.raises(FloatingPointError, match=r"^weights that are not finite: e\.1, e\.4$"):
        prints.digest()


@pytest.mark.parametrize("chunk", [1, 60, 1 << 17, None])
def test_rearranged_matrices_have_the_fingerprints_that_they_have_in_order(monkeypatch: pytest.MonkeyPatch, chunk: int | None) -> None:
    """`chunk`: of torch's elements; None: the compiled function."""
    _, stack = _experts(5)
    if chunk is not None:
        monkeypatch.setattr(fingerprint, "compiled", lambda: None)
        monkeypatch.setitem(fingerprint._CHUNK, "cpu", chunk)
        monkeypatch.setattr(fingerprint, "_STRETCH", 100)
    place = torch.randperm(37 * 53 + 11, generator=torch.Generator().manual_seed(1))[: 37 * 53]  # 11 places hold something else
    packed, key = torch.randn(5, 37 * 53 + 11), torch.zeros(37 * 53 + 11, dtype=torch.int64)
    packed[:, place], key[place] = stack.flatten(1), keys(37, 53, 6, 7, stack.device).flatten()
    assert rearranged_fingerprints(packed, key).tolist() == fingerprints(stack, 6, 7).tolist()
