"""Stopping a run: Ctrl-C, SIGTERM and the end of its terminal end it at the next place where its state is that of a finished step."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

from vlmrl.utils.terminal import signals_handled, stop_signals

T = TypeVar("T")

GRACE_SECONDS = 25.0  # for saving after SIGTERM: most schedulers and torchrun kill a process 30 seconds after it
FINISH_SECONDS = 5.0  # for servers, after a stop, to end a pause or to take weights: one that hangs would take minutes
SAME_SIGNAL_SECONDS = 1.0  # launchers such as torchrun pass on the Ctrl-C that the terminal has sent to all processes


class RunStopped(Exception):
    """A signal stopped the run. ``status`` is the program's exit status: 130 after SIGINT, 143 after SIGTERM, 129 after SIGHUP."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number


class StopRequest:
    """A request to stop a run, and the parts of the run that it may interrupt: ``await stop.interruptible(buffer.take(1))``.

    An interrupted part is cancelled. Everything else, such as an optimizer step, goes on to its end, so that the state which is then
    saved is that of a whole step.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        """The signal that requested it. None: the run goes on."""
        self.early = False
        """Whether the training ends after the current step, as if it were the last one."""
        self._part: asyncio.Task[Any] | None = None

    def request(self, number: int) -> None:
        """Stop the run at once if it is in an interruptible part, else at the next one."""
        self.number = number
        if self._part is not None:
            self._part.get_loop().call_soon_threadsafe(self._part.cancel)

    async def interruptible(self, part: Coroutine[Any, Any, T]) -> T:
        """Await ``part``. Raises RunStopped if a stop was requested before or meanwhile."""
        if self.number is not None:
            part.close()
            raise RunStopped(self.number)
        self._part = asyncio.ensure_future(part)
        if self.number is not None:  # a signal came before there was a part to cancel
            self._part.cancel()
        try:
            return await self._part
        except asyncio.CancelledError:
            if self.number is None:
                raise
            raise RunStopped(self.number) from None
        except Exception as error:  # such as one of a part that cleans up
            if self.number is None:
                raise
            raise RunStopped(self.number) from error
        finally:
            self._part = None

    async def finish(self, part: Coroutine[Any, Any, T]) -> T:
        """Await ``part``, which a stop ends :data:`FINISH_SECONDS` later. Raises RunStopped then."""
        finishing = asyncio.ensure_future(part)
        try:
            await self.interruptible(asyncio.wait({finishing}))
        except RunStopped:
            if not (await asyncio.wait({finishing}, timeout=FINISH_SECONDS))[0]:
                raise
        finally:
            finishing.cancel()
            if self.number is None:  # the caller was cancelled
                await asyncio.wait({finishing})
        return finishing.result()

    def check(self) -> None:
        """Raises RunStopped if a stop was requested."""
        if self.number is not None:
            raise RunStopped(self.number)


@contextmanager
def stop_on_signals(
    stop: StopRequest, grace_seconds: float | None = None, numbers: Sequence[int] | None = None
) -> Iterator[None]:
    """Let SIGINT, SIGTERM and SIGHUP, the end of the terminal, or the signals of ``numbers`` request the stop. SIGHUP stays ignored
    under `nohup`.

    A second SIGINT ends the process, unless it comes within a second: launchers pass the first one on. A second SIGTERM does not.

    ``grace_seconds`` after SIGTERM the process ends, whatever it does: a scheduler would kill it, and servers that it started with it.
    Only the main thread can set handlers: in another one this does nothing.
    """
    first, timers = 0.0, list[threading.Timer]()

    def on_signal(number: int, _: FrameType | None) -> None:
        nonlocal first
        requested, now = stop.number, time.monotonic()
        if requested is None:
            first = now
        if requested is None or number == signal.SIGTERM:
            stop.number = number  # before any call: a second signal may interrupt this handler
        if number == signal.SIGTERM and requested != signal.SIGTERM and grace_seconds is not None:
            late = f"not all saved within {grace_seconds:g} seconds after SIGTERM: what is written by now stays"
            timer = threading.Timer(grace_seconds, _end_process, (number, late))
            timer.daemon = True
            timer.start()
            timers.append(timer)
        if requested is None:
            if number == signal.SIGINT:
                _say("stopping: the last finished step is saved first; Ctrl-C again stops at once")
            stop.request(number)
        elif number == signal.SIGINT and now - first >= SAME_SIGNAL_SECONDS:
            _end_process(number, "stopped at once: what was not saved yet is lost")

    with signals_handled(stop_signals() if numbers is None else numbers, on_signal):
        try:
            yield
        finally:
            for timer in timers:
                timer.cancel()


@contextmanager
def ended_as_by_ctrl_c() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end the block as Ctrl-C does, so that what it has finished is written. The exit status is theirs."""
    received: list[int] = []

    def on_signal(number: int, _: FrameType | None) -> None:
        if received:
            return
        received.append(number)
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # of a command that a script started in the background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    with signals_handled((number for number in stop_signals() if number != signal.SIGINT), on_signal):
        try:
            yield
        except KeyboardInterrupt:
            if not received:
                raise
            _say(f"stopped by {signal.Signals(received[0]).name}")
            raise SystemExit(128 + received[0]) from None


def _end_process(number: int, why: str) -> None:
    _say(why)
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(128 + number)


def _say(text: str) -> None:
    """Print from a signal handler, in which the console's lock may be taken."""
    with suppress(OSError):  # nobody reads it: the same Ctrl-C has ended `| tee`
        os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\n{text}\n".encode())
