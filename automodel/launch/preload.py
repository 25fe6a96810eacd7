"""Imported first in the fork server: readies it, and with it every rank forked from it.

Not for import anywhere else: it changes signal handling at import.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal

from automodel.launch.forkserver import LAUNCHER_VARIABLE, PRELOAD_VARIABLE
from automodel.launch.lifetime import DUMP_SIGNAL, SAVE_SIGNAL, end_with_parent


def _prepare() -> None:
    end_with_parent()
    if os.environ.get(LAUNCHER_VARIABLE, str(os.getppid())) != str(os.getppid()):
        # The launcher ended before the kernel was asked to tell: nobody waits for what would be imported now.
        os._exit(1)
    # A terminal sends Ctrl-C to every process, and some supervisors SIGTERM; what they mean for the
    # run is the launcher's decision. The request for stacks must not end a rank that is not ready.
    for number in (signal.SIGINT, signal.SIGTERM, SAVE_SIGNAL, DUMP_SIGNAL):
        signal.signal(number, signal.SIG_IGN)
    # No garbage is worth a search during imports, and what they leave is never garbage: kept out of
    # the ranks' searches, its memory stays shared.
    gc.disable()
    for name in os.environ.get(PRELOAD_VARIABLE, "").split(","):
        if name:
            # The rank that needs the module meets the same error, and reports it with its traceback.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    gc.enable()
    gc.freeze()


_prepare()
