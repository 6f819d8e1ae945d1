"""Random keys: each purpose has its own, made from the seed."""

import hashlib


def derive(seed: int, *keys: int | str) -> int:
    """Return the random key of one purpose: a stable 63-bit hash of the seed and of what it is used for."""
    text = "/".join(str(part) for part in (seed, *keys))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
