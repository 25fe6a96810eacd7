"""A process's ties to those around it: how it learns that it should stop, or that it is alone."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import FrameType

# Asks a rank for its Python stacks. Real-time signals have no other users; macOS has none of them.
DUMP_SIGNAL: signal.Signals = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
SAVE_SIGNAL = signal.SIGUSR1
STOP_MESSAGE = b"stop"
SAVE_MESSAGE = b"save"
_PR_SET_PDEATHSIG = 1


class StopFlag:
    """What this process was asked to do after the current step: stop (``stop_requested()``), or save and go on."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._save = threading.Event()

    def __call__(self) -> bool:
        return self._event.is_set()

    def set(self) -> None:
        self._event.set()

    def request_save(self) -> None:
        self._save.set()

    def take_save_request(self) -> bool:
        """Whether a checkpoint was asked for since the last call."""
        requested = self._save.is_set()
        if requested:
            self._save.clear()
        return requested

    def wait(self) -> None:
        """Return once the flag is set."""
        self._event.wait()

    def set_on_signals(self) -> None:
        """SIGTERM asks to stop, SIGUSR1 to save. Main thread only."""
        signal.signal(signal.SIGTERM, lambda *_: self._event.set())
        signal.signal(SAVE_SIGNAL, lambda *_: self._save.set())


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def follow_launcher(control: Connection, flag: StopFlag) -> None:
    """Watch the launcher's end of ``control`` from a thread of this process.

    A stop or save message sets ``flag``. The end of the pipe means that the launcher is gone, however it
    ended: this process then kills itself, since no step of it has a use any more.
    """

    def watch() -> None:
        while True:
            try:
                message = control.recv_bytes()
            except (EOFError, OSError):
                os.kill(os.getpid(), signal.SIGKILL)
                return
            if message == STOP_MESSAGE:
                flag.set()
            elif message == SAVE_MESSAGE:
                flag.request_save()

    threading.Thread(target=watch, name="follow_launcher", daemon=True).start()


class SignalWatch:
    """Counts SIGINT, SIGTERM and SIGUSR1 in the launcher and wakes whoever waits on :meth:`fileno`."""

    def __init__(self) -> None:
        self.interrupted = 0
        self.terminated = 0
        self.saves_requested = 0
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        os.set_blocking(self._reader, False)

    def fileno(self) -> int:
        return self._reader

    def clear(self) -> None:
        """Forget that somebody was woken; the counts stay."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupted += 1
        elif number == SAVE_SIGNAL:
            self.saves_requested += 1
        else:
            self.terminated += 1
        with contextlib.suppress(BlockingIOError):
            os.write(self._writer, b"x")

    @contextlib.contextmanager
    def installed(self) -> Iterator[SignalWatch]:
        """Handle the signals inside the block. Does nothing outside the main thread."""
        previous = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, SAVE_SIGNAL):
                previous[number] = signal.signal(number, self._on_signal)
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            os.close(self._reader)
            os.close(self._writer)
