"""A cache of values that are computed once, such as the encoded images that all members of a group send."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """Values by key, of at most ``most`` bytes together: beyond that the oldest are dropped. ``size`` gives a value's bytes.

    For any thread.
    """

    def __init__(self, most: int, size: Callable[[T], int]) -> None:
        self.most = most
        self.bytes = 0
        self._size = size
        self._values: dict[str, T] = {}  # oldest first
        self._lock = threading.Lock()

    def get(self, key: str) -> T | None:
        return self._values.get(key)

    def keep(self, key: str, value: T) -> T:
        """Keep ``value``, unless it alone has more than ``most`` bytes. Returns it."""
        if self._size(value) > self.most:
            return value
        with self._lock:
            if (earlier := self._values.pop(key, None)) is not None:
                self.bytes -= self._size(earlier)
            self.bytes += self._size(value)
            self._values[key] = value
            while self.bytes > self.most:
                self.bytes -= self._size(self._values.pop(next(iter(self._values))))
        return value

    def of_text(self, text: str, make: Callable[[], T]) -> T:
        """The value of a long ``text``, by its digest; ``make()`` makes it if it is not kept, and raises what is raised here."""
        key = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        value = self.get(key)
        return self.keep(key, make()) if value is None else value
