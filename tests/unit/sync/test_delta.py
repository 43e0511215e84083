"""Laws of delta sync: what a receiver puts together has the bits that were sent, however few of them travelled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.sync.delta import DeltaReceiver
from megarl.sync.receive import BucketReceiver, Own
from megarl.sync.send import Sender, Sent
from megarl.sync.wire import Change, Header, TensorName

Stream = list[tuple[TensorName, Tensor]]


class Pair:
    """A sender of changes and its receiver, in shared memory, with buckets of 1 MiB."""

    def __init__(self, every: int, own: Own | None = None) -> None:
        self.receiver = BucketReceiver(torch.device("cpu"), own)
        self._version = -1
        self.sender = Sender("shm", workers=1, host="", bucket_mb=1, timeout_s=10.0, device=torch.device("cpu"), delta=every)

    def update(self, stream: Stream, watch: Callable[[Any, Tensor], None] | None = None) -> tuple[dict[str, Tensor], Sent]:
        found = dict[str, Tensor]()

        def announce(plain: dict[str, Any]) -> Callable[[], object]:
            found.update({name: one.clone() for name, one in self.receiver.receive([Header.parse(plain)])})
            return lambda: None

        self._version += 1
        return found, self.sender.send(stream, announce, watch, self._version)


def _weights(dtype: torch.dtype) -> Stream:
    generator = torch.Generator().manual_seed(1)
    experts = torch.randn(6, 300, 500, generator=generator).to(dtype)  # more than a bucket
    return [("embed", torch.randn(1000, 700, generator=generator).to(dtype)), ([f"e.{n}" for n in range(6)], experts)]


def _assert_same(found: dict[str, Tensor], stream: Stream) -> None:
    whole = {"embed": stream[0][1]} | dict(zip(stream[1][0], stream[1][1], strict=True))
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.contiguous().view(torch.uint8)), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_changes_give_the_bits_that_were_sent_in_fewer_bytes(dtype: torch.dtype) -> None:
    pair, stream = Pair(every=4), _weights(dtype)
    total = sum(tensor.numel() for _, tensor in stream)
    sizes = []
    for update in range(6):
        seen = dict[str, int]()
        found, sent = pair.update(stream, lambda name, tensor: seen.update({str(name): tensor.numel()}))  # noqa: B023
        _assert_same(found, stream)
        assert sent.elements == total == sum(seen.values()) and sent.tensors == 7
        assert sent.changed == (total if update % 4 == 0 else 3 + 20_000)
        sizes.append(sent.nbytes)
        for _, tensor in stream:
            tensor.view(torch.uint8).view(-1)[:: tensor.nbytes // 10_000][:10_000] ^= 1  # 10,000 elements of each
        stream[0][1].view(torch.uint8).view(-1)[-3 * tensor.element_size() :: tensor.element_size()] ^= 2
    pair.sender.close()
    assert max(sizes[1:4] + sizes[5:]) < 0.1 * sizes[0] * 2 / dtype.itemsize and sizes[4] == sizes[0]


def test_signs_of_zero_and_not_a_number_are_changes() -> None:
    pair, tensor = Pair(every=9), torch.zeros(100_000, dtype=torch.bfloat16)
    pair.update([("a", tensor)])
    tensor[70_000], tensor[70_001] = -0.0, torch.nan  # a distance of more than 65,535
    found, sent = pair.update([("a", tensor)])
    assert torch.equal(found["a"].view(torch.int16), tensor.view(torch.int16)) and sent.changed == 2 and sent.nbytes <= 128
    assert pair.update([("a", tensor)])[1].changed == 0, "and nothing changed since"
    pair.sender.close()


def test_a_tensor_that_changed_much_is_sent_whole_and_the_next_changes_are_those_of_it() -> None:
    pair, tensor = Pair(every=9), torch.randn(1000).to(torch.bfloat16)
    pair.update([("a", tensor)])
    tensor = tensor + 1
    found, sent = pair.update([("a", tensor)])
    assert sent.changed == 1000 and torch.equal(found["a"], tensor)
    tensor[7] = 3.0
    found, sent = pair.update([("a", tensor)])
    assert sent.changed == 1 and torch.equal(found["a"], tensor)
    pair.sender.close()


def test_changes_of_what_a_worker_does_not_keep_are_refused() -> None:
    with pytest.raises(LookupError, match=r"^a: its changes came, and this worker does not keep"):
        DeltaReceiver().merge("a", torch.zeros(64, dtype=torch.uint8), Change(0, True), 0)


@pytest.mark.parametrize("place", [None, torch.device("cpu")])
def test_what_a_worker_keeps_of_a_stack_holds_no_memory_of_the_rest(place: torch.device | None) -> None:
    names, stack = list("abcdef"), torch.randn(6, 30, 50).to(torch.bfloat16)
    receiver, parts = BucketReceiver(torch.device("cpu"), lambda _: (2, 4)), list[Tensor]()
    sender = Sender("shm", workers=1, host="", bucket_mb=1, timeout_s=10.0, device=torch.device("cpu"), delta=9)

    def announce(plain: dict[str, Any]) -> Callable[[], object]:
        parts.extend(tensor for _, tensor in receiver.receive_stacks([Header.parse(plain)], place))
        return lambda: None

    sender.send([(names, stack)], announce)
    sender.close()
    [part] = parts
    assert torch.equal(part, stack[2:4]) and part.untyped_storage().nbytes() == stack[2:4].nbytes


def test_a_bucket_of_an_earlier_connection_gets_into_no_later_one() -> None:
    """It is unpacked in a thread of its own, which may be late."""
    pair, later = Pair(every=9), list[Any]()

    def announce(plain: dict[str, Any]) -> Callable[[], object]:
        later.append(pair.receiver.receive_stacks([Header.parse(plain)]))
        return lambda: None

    pair.sender.send([("a", torch.ones(64))], announce)
    pair.receiver.connect([], 0)
    assert [name for name, _ in later[0]] == ["a"]
    with pytest.raises(LookupError, match=r"^a: its changes came, and this worker does not keep"):
        pair.receiver._delta.merge("a", torch.zeros(64, dtype=torch.uint8), Change(0, True), 0)
    pair.sender.close()


@pytest.mark.parametrize("own", [(0, 2), (2, 5), (5, 6), (3, 3)])
def test_a_worker_gets_and_keeps_the_tensors_of_a_stack_that_it_needs(own: tuple[int, int]) -> None:
    names, stack = list("abcdef"), torch.randn(6, 30, 50).to(torch.bfloat16)
    pair = Pair(every=9, own=lambda _: own)
    for _ in range(3):
        found, _ = pair.update([(names, stack)])
        assert list(found) == names[slice(*own)]
        assert all(torch.equal(one, stack[names.index(name)]) for name, one in found.items())
        stack.view(-1)[::70] += 1
    pair.sender.close()
