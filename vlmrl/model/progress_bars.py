"""What transformers changes for the whole process while it loads a model: its progress bars, and functions of torch."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from transformers.utils import logging

_loading = threading.RLock()


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Loads and saves in the block, or in the function that it decorates, show no progress bar. Later ones do, as before."""
    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """No other thread loads a model in the block, or in the function that it decorates.

    While transformers loads, it replaces functions such as ``torch.nn.init.normal_`` by empty ones. Of two threads the second one
    would take the empty ones for the original ones, and restore them: all later models of the process would lack weights.
    """
    with _loading:
        yield
