"""Python logging of a rank: one ``train.log`` for the whole run, and the console on rank 0."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

LOG_NAME = "train.log"


class AppendHandler(logging.Handler):
    """Appends each record with a single write, so that lines of several ranks never mix."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(self._descriptor, (self.format(record) + "\n").encode())
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()


def configure_logging(run_dir: Path, rank: int, console: bool) -> None:
    """Send this process's logging and warnings to ``<run_dir>/train.log``, replacing earlier handlers.

    ``automodel`` logs from INFO, libraries from WARNING.

    Args:
        run_dir: an existing folder.
        rank: named in each line when above 0.
        console: also print plain messages on standard output.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    file_handler = AppendHandler(run_dir / LOG_NAME)
    who = f" rank {rank}" if rank > 0 else ""
    file_handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s{who} %(message)s"))
    root.addHandler(file_handler)
    if console:
        stream = logging.StreamHandler(sys.stdout)
        stream.setFormatter(logging.Formatter("%(message)s"))
        root.addHandler(stream)
    root.setLevel(logging.WARNING)
    logging.getLogger("automodel").setLevel(logging.INFO)
    logging.captureWarnings(True)


def append_text(run_dir: Path, text: str) -> None:
    """Append ``text`` to the run's log as it stands, from a process that has no logging of its own."""
    descriptor = os.open(run_dir / LOG_NAME, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        os.write(descriptor, (text.rstrip("\n") + "\n").encode())
    finally:
        os.close(descriptor)
