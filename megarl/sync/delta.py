"""Delta sync: a tensor travels as the elements whose bits changed since the update before, and is put together again by its receiver.

An update moves few of a policy's bfloat16 values: at a learning rate of 1e-6 most steps are smaller than half the distance between two
neighbouring values. Both sides keep the tensors of the last update in host memory. Elements are compared by their bits, so that what is put
together is what would have been sent, whatever the values are (negative zeros and NaN included). A tensor of which so many elements have
changed that their positions and values take more bytes than all of it is sent whole.

Positions are counted through the flattened tensor, or stack, and travel as distances from the changed element before: 2 bytes each, or 4
where one is larger than 65,535.
"""

import torch
from torch import Tensor

from megarl.sync.wire import ALIGN, Change, TensorName, aligned

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}  # element size -> integer view
_NARROW = 1 << 16  # distances below it take 2 bytes


class DeltaSender:
    """Compares the tensors of each update with those of the one before.

    Args:
        every: an update whose version this number divides sends everything, and so does the first.
    """

    def __init__(self, every: int) -> None:
        self._every, self._whole = every, True
        self._kept: dict[str, Tensor] = {}  # on the CPU, by the (first) name
        self.changed = 0
        """The elements of the present update that were sent."""

    def begin(self, version: int) -> None:
        """Begin the update of a version: so a run that goes on from a checkpoint sends everything when it would have done so anyway."""
        self._whole = version % self._every == 0
        self.changed = 0

    def pack(self, name: TensorName, tensor: Tensor) -> tuple[Tensor, Change] | None:
        """Keep a tensor, or a stack, for the next update.

        Returns:
            uint8 [bytes]: distances, padding to ALIGN and values of its changed elements, and what describes them. None: send it whole.
        """
        key, flat_N = _key(name), tensor.detach().contiguous().flatten()
        kept_N = self._kept.get(key)
        if kept_N is None or kept_N.shape != flat_N.shape or kept_N.dtype != flat_N.dtype:
            kept_N = self._kept[key] = torch.empty(flat_N.shape, dtype=flat_N.dtype)
        elif not self._whole:
            bits = _BITS[flat_N.element_size()]
            differs_N = flat_N.view(bits) != kept_N.to(flat_N.device).view(bits)
            # At least this much is sent of each; where that is too much, their places, of 8 bytes each, are not made.
            if int(differs_N.count_nonzero()) * (2 + flat_N.element_size()) < flat_N.nbytes:
                place_K = differs_N.nonzero().squeeze(1)
                packed_B, change = _packed(flat_N, place_K)
                if len(packed_B) < flat_N.nbytes:
                    self.changed += len(place_K)
                    kept_N[place_K.cpu()] = flat_N[place_K].cpu()
                    return packed_B, change
        self.changed += flat_N.numel()
        kept_N.copy_(flat_N)
        return None


class DeltaReceiver:
    """Puts the tensors of each update together."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}  # on the CPU, by the (first) name as sent

    def keep(self, name: TensorName, tensor: Tensor) -> None:
        """Keep what this worker needs of a tensor that came whole; its memory must not change."""
        self._kept[_key(name)] = tensor.cpu()

    def merge(self, name: TensorName, bytes_B: Tensor, change: Change, first: int) -> Tensor:
        """Put changed elements into what is kept of a tensor.

        Args:
            name: its name, or those of the stack.
            bytes_B: uint8, as `DeltaSender.pack` made it.
            change: what describes the bytes.
            first: the place of the first element that is kept, in the flattened tensor as sent.

        Returns:
            What is kept, with the changes: memory on the CPU, which the next update changes.

        Raises:
            LookupError: nothing is kept of it.
        """
        kept = self._kept.get(_key(name))
        if kept is None:
            raise LookupError(f"{_key(name)}: its changes came, and this worker does not keep what they change")
        bits, wide = _BITS[kept.element_size()], torch.int16 if change.narrow else torch.int32
        start = aligned(change.count * wide.itemsize)
        step_K = bytes_B[: change.count * wide.itemsize].view(wide).cpu().long()
        place_K = (step_K & (_NARROW - 1) if change.narrow else step_K).cumsum(0)
        low, high = torch.searchsorted(place_K, torch.tensor([first, first + kept.numel()])).tolist()
        value_K = bytes_B[start : start + change.count * kept.element_size()].view(bits)
        kept.view(-1).view(bits)[place_K[low:high] - first] = value_K[low:high].cpu()
        return kept


def _key(name: TensorName) -> str:
    return name if isinstance(name, str) else name[0]


def _packed(flat_N: Tensor, place_K: Tensor) -> tuple[Tensor, Change]:
    step_K = torch.diff(place_K, prepend=place_K.new_zeros(1))
    narrow = not len(step_K) or int(step_K.max()) < _NARROW
    step_B = step_K.to(torch.int16 if narrow else torch.int32).view(torch.uint8)  # int16 wraps; the receiver takes the bits as unsigned
    padding_B = step_B.new_zeros(-len(step_B) % ALIGN)
    return torch.cat([step_B, padding_B, flat_N[place_K].view(torch.uint8)]), Change(len(place_K), narrow)
