"""Laws of the fingerprint: exact, position-aware, additive over shards."""

import math
import pickle
from dataclasses import replace

import pytest
import torch

from megarl.sync import fingerprint as fingerprint_module
from megarl.sync.fingerprint import (
    _CHUNK,
    Fingerprinter,
    FingerprintMismatch,
    Piece,
    Print,
    check,
    compare,
    fingerprints,
    join,
)
from megarl.sync.kernel import compiled
from tests.unit.sync.one_tensor import fingerprint

FP8 = torch.float8_e4m3fn
WIDE = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = [*WIDE, FP8]
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16, FP8: torch.int8}


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each law holds for the compiled function, which this machine must be able to compile, and for torch."""
    assert compiled() is not None
    if request.param == "torch":
        monkeypatch.setattr(fingerprint_module, "compiled", lambda: None)


def _weight(dtype: torch.dtype, rows: int = 37, columns: int = 53) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprint_is_the_brute_force_sum(dtype: torch.dtype) -> None:
    weight = _weight(dtype, 3, 5)
    bits = weight.view(BITS[dtype])
    total = 0
    for row in range(3):
        for column in range(5):
            total += int(bits[row, column]) * _key(0x1234567, row) * _key(0x89ABCDE, column)
    assert int(fingerprint(weight)) % (1 << 64) == total % (1 << 64)


def _key(seed: int, index: int) -> int:
    mask = (1 << 64) - 1
    z = ((index + 1) * 0x9E3779B97F4A7C15 + seed) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return (z ^ (z >> 31)) | 1


@pytest.mark.parametrize(
    ("dtype", "value"), [(FP8, math.nan), *((dtype, value) for dtype in WIDE for value in (math.nan, math.inf, -math.inf))]
)
def test_tensors_that_are_not_finite_are_named(dtype: torch.dtype, value: float) -> None:
    prints, ruined = Fingerprinter(), _weight(dtype)
    ruined[17, 1] = value
    for name, weight in (("a", _weight(dtype)), ("b", ruined), ("c", _weight(dtype))):
        prints.add(name, weight)
    with pytest.raises(FloatingPointError, match="^weights that are not finite: b$"):
        prints.digest()


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_changed_bit_changes_a_fingerprint(dtype: torch.dtype) -> None:
    weight = _weight(dtype)
    before = fingerprint(weight)
    for row, column in [(0, 0), (36, 52), (17, 1)]:
        changed = weight.clone()
        bits = changed.view(BITS[dtype])
        bits[row, column] ^= 1  # the last bit of the mantissa
        assert fingerprint(changed) != before


def test_moved_and_swapped_elements_change_a_fingerprint() -> None:
    weight = _weight(torch.float32)
    before = fingerprint(weight)
    assert fingerprint(weight.flip(0)) != before
    assert fingerprint(weight.flip(1)) != before
    assert fingerprint(weight.t().contiguous()) != before
    swapped = weight.clone()
    swapped[[3, 4]] = swapped[[4, 3]]
    assert fingerprint(swapped) != before


@pytest.mark.parametrize("dtype", DTYPES)
def test_fingerprints_of_shards_add_up(dtype: torch.dtype) -> None:
    weight = _weight(dtype)
    assert fingerprint(weight) == fingerprint(weight[:9]) + fingerprint(weight[9:], row=9)
    assert fingerprint(weight) == fingerprint(weight[:, :20]) + fingerprint(weight[:, 20:], column=20)
    vector = weight[0]
    assert fingerprint(vector) == fingerprint(vector[:5]) + fingerprint(vector[5:], column=5)


def test_fingerprints_do_not_depend_on_chunks_or_stacking(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = torch.randn(5, 37, 53, generator=torch.Generator().manual_seed(1))
    whole = fingerprints(stack)
    assert whole.tolist() == [int(fingerprint(matrix)) for matrix in stack]
    for chunk in (1, 60, 2000, 5000):
        monkeypatch.setitem(_CHUNK, "cpu", chunk)
        assert fingerprints(stack).tolist() == whole.tolist()


@pytest.mark.parametrize("dtype", WIDE)
def test_zeros_and_subnormals_have_the_same_fingerprint(dtype: torch.dtype) -> None:
    weight = _weight(dtype)
    weight[2, 3], weight[4, 5] = 0.0, 0.0
    flushed = weight.clone()
    flushed[2, 3], flushed[4, 5] = -0.0, torch.finfo(dtype).smallest_normal / 2
    assert flushed[4, 5] != 0
    assert fingerprint(flushed) == fingerprint(weight)


def test_all_fp8_numbers_have_different_fingerprints() -> None:
    """All 254 numbers of e4m3 differ, subnormal ones and the two zeros included."""
    numbers = torch.arange(256, dtype=torch.uint8).view(FP8).view(256, 1, 1)
    numbers = numbers[~numbers.float().isnan().flatten()]
    assert len(set(fingerprints(numbers).tolist())) == len(numbers) == 254


def test_fingerprints_refuse_integer_tensors() -> None:
    with pytest.raises(TypeError, match="int64"):
        fingerprint(torch.arange(3))


def test_a_stream_with_a_name_twice_is_refused() -> None:
    stream = Fingerprinter()
    stream.add("a", torch.ones(2))
    with pytest.raises(ValueError, match="a came twice"):
        stream.add("a", torch.ones(2))


def test_join_adds_shards_and_checks_replicas() -> None:
    weight = _weight(torch.float32)
    whole = Print(int(fingerprint(weight)), weight.numel())
    left = Piece(0, 0, 37, 20, int(fingerprint(weight[:, :20])))
    right = Piece(0, 20, 37, 33, int(fingerprint(weight[:, 20:], column=20)))
    assert join([{"w": [left]}, {"w": [right]}]) == {"w": [whole]}
    assert join([{"w": [left, right]}]) == {"w": [whole]}, "in one place of one worker"
    assert join([{"w": [left, replace(right, place=1)]}]) == {"w": [Print(left.value, 37 * 20), Print(right.value, 37 * 33)]}
    replica = Piece(0, 0, 37, 53, whole.value)
    assert join([{"w": [replica]}, {"w": [replica]}]) == {"w": [whole]}
    other = Piece(0, 0, 37, 53, whole.value + 1)
    assert compare({"w": whole}, join([{"w": [replica]}, {"w": [other]}])) == ["w"]


def test_compare_names_what_differs_is_partial_or_uncovered() -> None:
    sent = {name: Print(value, 6) for name, value in [("same", 1), ("bits", 2), ("partial", 3), ("lost", 4), ("second", 5)]}
    held = {
        "same": [Print(1, 6)],
        "bits": [Print(9, 6)],
        "partial": [Print(3, 5)],
        "second": [Print(5, 6), Print(6, 6)],  # right in the embedding table, wrong in the output layer
        "stray": [Print(1, 1)],
    }
    assert compare(sent, held) == ["bits", "lost", "partial", "second", "stray"]
    with pytest.raises(FingerprintMismatch, match="engine 1 does not hold the weights that the trainer sent: bits, lost"):
        check(sent, held, "engine 1")


def test_the_mismatch_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(FingerprintMismatch(["a", "b"], "engine 1")))
    assert error.names == ["a", "b"] and "engine 1" in str(error)
