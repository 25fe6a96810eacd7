"""The fork server: one process that has imported torch and the model, from which ranks are forked.

Eight ranks started from it reach their first collective in about the time of one, and share the
memory of the imported libraries.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.context import ForkServerContext

PRELOAD_VARIABLE = "AUTOMODEL_PRELOAD"
LAUNCHER_VARIABLE = "AUTOMODEL_LAUNCHER"


def start(preload: Sequence[str]) -> ForkServerContext:
    """Start the fork server, unless it runs, and return the context that starts processes from it.

    Returns at once; the server imports ``preload`` meanwhile. A server that runs already keeps what
    it has imported.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["automodel.launch.preload"])
    # multiprocessing hands sys.path to the children of the server, but not to the server.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    with (
        _variable("PYTHONPATH", path),
        _variable(PRELOAD_VARIABLE, ",".join(preload)),
        _variable(LAUNCHER_VARIABLE, str(os.getpid())),
        # A module that asks for GPUs at import must not open CUDA here: no forked rank could use it then.
        _variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
        _signals_ignored(),
    ):
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if previous is not None:
            os.environ[name] = previous


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    """A process started inside ignores SIGINT and SIGTERM from its first instruction."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
