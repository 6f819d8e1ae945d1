"""Random keys: each use of randomness has its own, derived from the seed."""

import hashlib


def derive(seed: int, *keys: int | str) -> int:
    """Return the random key for one purpose: a stable 63-bit hash of the seed and the purpose."""
    text = "/".join(str(part) for part in (seed, *keys))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
