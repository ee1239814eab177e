"""Names in a log: cut where they are longer than anything a person would read, and still told apart."""

from __future__ import annotations

import hashlib
from typing import Final

#: Characters of a source line or a name in an event.
MAX_NAME: Final = 1 << 16
_DIGEST: Final = 8


def shortened(text: str, limit: int = MAX_NAME) -> str:
    """``text``, or its beginning and a digest of all of it where it has more than ``limit`` characters."""
    if len(text) <= limit:
        return text
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_DIGEST // 2).hexdigest()
    return f"{text[: limit - _DIGEST - 1]}…{digest}"
