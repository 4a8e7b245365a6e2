"""Values that are made from long texts again and again, such as the token ids of an agent's tools."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
ENTRY_BYTES = 300  # of a digest, its value's size and its places in the dictionary


class KeptByText(Generic[T]):
    """The values that were asked for last, by the digests of their texts, of at most ``most`` bytes together. For any thread.

    ``size`` gives a value's bytes::

        kept = KeptByText(2**20, sys.getsizeof)
        kept.get("a long text", make)   # make() at the first time only
    """

    def __init__(self, most: int, size: Callable[[T], int]) -> None:
        self.most = most
        self.bytes = 0
        self._size = size
        self._values: OrderedDict[bytes, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, text: str, make: Callable[[], T]) -> T:
        """The value of ``text``, made by ``make()`` if it is not kept. What that raises is raised here, and nothing is kept."""
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
        value = make()
        size = self._size(value) + ENTRY_BYTES
        with self._lock:
            if key not in self._values and size <= self.most:
                self._values[key] = value, size
                self.bytes += size
            while self.bytes > self.most:
                self.bytes -= self._values.popitem(last=False)[1][1]
        return value
