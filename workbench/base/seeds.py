"""Random seeds that depend on what is sampled, never on when or on which worker."""

from __future__ import annotations

import hashlib


def derive(*parts: object) -> int:
    """Derive a 63-bit seed from the parts of a name, such as (run seed, purpose, step, uid, sample, turn, attempt).

    Any row can be generated again alone, and the number or order of workers cannot change a token.

    >>> derive(0, "rollout", 1, "a", 0, 0, 0) == derive(0, "rollout", 1, "a", 0, 0, 0)
    True
    """
    # repr keeps 1 and "1" apart; the separator cannot occur unescaped inside a repr of a string
    text = "\x1f".join(repr(part) for part in parts)
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
