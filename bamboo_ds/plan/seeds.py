"""Seeds as pure functions of a position in training.

A pipeline changes shape while it trains, and a lost forward is run again by another worker. Both must draw the same
random numbers as the undisturbed run, so no seed may depend on a rank, a stage or on what was drawn before: it is a
hash of where we are.
"""

from __future__ import annotations

import hashlib
import struct

_POSITIVE = (1 << 63) - 1


def layer_seed(seed: int, *, step: int, micro_batch: int, layer: int) -> int:
    """Return the seed under which a layer runs one micro-batch.

    Args:
        seed: the job's seed (`bamboo.seed`).
        step: the number of committed optimizer steps before this one.
        micro_batch: index in the *global* batch, 0 <= micro_batch < M.
        layer: global layer index.

    Returns:
        A number in [0, 2**63).
    """
    return _hash(b"layer", seed, step, micro_batch, layer)


def batch_seed(seed: int, *, step: int, micro_batch: int) -> int:
    """Return the seed under which a micro-batch is drawn from the data iterator (shuffles, random crops)."""
    return _hash(b"batch", seed, step, micro_batch)


def initial_seed(seed: int, *, layer: int) -> int:
    """Return the seed of a layer's initial weights, where the module gives none by `seed_layers`."""
    return _hash(b"initial", seed, layer)


def _hash(purpose: bytes, *numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}q", *(number & _POSITIVE for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8, person=purpose).digest(), "little") & _POSITIVE
