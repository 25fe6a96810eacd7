"""What a person sees of a run: a bar on a terminal, plain lines elsewhere, and the same lines in the log."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from automodel.training.metrics import StepMetrics, ValidationMetrics
from automodel.training.summary import format_count, format_duration, printable

_LOG = logging.getLogger(__name__)
_REFRESH_SECONDS = 0.2
_RATE_STEPS = 20
_BAR_WIDTH = 24


class Progress:
    """Shows a run's progress on one console; a context manager, for rank 0.

    Each line goes to the console once, and once to Python's logging as ``automodel.training.progress``;
    logging's own console handlers, which must be set up before, skip those records. While a bar is up,
    their other records appear above it. :meth:`message` also works outside the ``with`` block.

    The bar is drawn by :meth:`update`, a few times a second at most: no thread competes with training,
    and nothing is left to undo when the process is killed, since the cursor is never hidden.

    Args:
        total_steps: the last step's number.
        first_step: the first step of this process, above 1 when it resumes.
        log_every_steps: how often a plain line is written; the first and the last step always are.
        console: where to write; standard output by default.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int = 1,
        log_every_steps: int = 1,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console = console or Console(highlight=False, markup=False, emoji=False)
        self._total_steps = total_steps
        self._first_step = first_step
        self._log_every_steps = max(1, log_every_steps)
        self._clock = clock
        self._step_ends: deque[tuple[int, float]] = deque(maxlen=_RATE_STEPS + 1)
        self._last: StepMetrics | None = None
        self._last_drawn = -_REFRESH_SECONDS
        self._live: Live | None = None
        self._handlers: list[tuple[logging.StreamHandler[TextIO], TextIO]] = []
        for handler in _console_handlers():
            # Stays for good: messages before and after the bar are shown here, too.
            handler.addFilter(_not_shown_yet)

    def __enter__(self) -> Progress:
        self._step_ends.append((self._first_step - 1, self._clock()))
        self._handlers = [(handler, handler.stream) for handler in _console_handlers()]
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            # Errors that go to a file stay there.
            errors_too = sys.stderr.isatty()
            error_streams = (sys.stderr, sys.__stderr__)
            self._live = Live(
                console=self._console, get_renderable=self._bar, auto_refresh=False, redirect_stderr=errors_too
            )
            self._live.start()
            # rich hides the cursor, and a killed process could not bring it back.
            self._console.show_cursor(True)
            for handler, stream in self._handlers:
                if errors_too or stream not in error_streams:
                    # rich has put itself there, to print above the bar.
                    handler.setStream(sys.stdout)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers = []
        if self._live is not None:
            self._live.stop()
            self._live = None

    def update(self, metrics: StepMetrics) -> None:
        """A step is done."""
        self._step_ends.append((metrics.step, self._clock()))
        self._last = metrics
        ends = metrics.step in (self._first_step, self._total_steps)
        if ends or metrics.step % self._log_every_steps == 0:
            line = self._step_line(metrics)
            if self._live is None:
                self._print(line)
            _log(line)
        if self._live is not None and (ends or self._clock() - self._last_drawn >= _REFRESH_SECONDS):
            self._last_drawn = self._clock()
            self._live.refresh()

    def validation(self, metrics: ValidationMetrics) -> None:
        """A pass over the validation samples is done."""
        self.message(f"step {metrics.step}/{self._total_steps} validation loss {metrics.val_loss:.4f}")

    def message(self, text: str) -> None:
        """Show ``text``, of one or more lines, above the bar or as plain lines; control characters are escaped."""
        text = printable(text)
        self._print(text)
        _log(text)

    def _print(self, text: str) -> None:
        # What the console's encoding lacks is shown as an escape: it must not end the run.
        encoding = self._console.encoding
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        self._console.print(Text(text), soft_wrap=True)
        self._console.file.flush()

    def _step_line(self, metrics: StepMetrics) -> str:
        mfu = "" if metrics.mfu is None else f" mfu {metrics.mfu:.1%}"
        return (
            f"step {metrics.step}/{self._total_steps} loss {metrics.loss:.4f} norm {metrics.grad_norm:.3g} "
            f"lr {metrics.lr:.1e} {format_count(metrics.tokens_per_second)} tok/s{mfu} eta {self._time_left()}"
        )

    def _time_left(self) -> str:
        """From the pace of the last steps, with everything that happened between them."""
        (first, start), (last, end) = self._step_ends[0], self._step_ends[-1]
        if last == first:
            return "-:--"
        return format_duration((end - start) / (last - first) * (self._total_steps - last))

    def _bar(self) -> Table:
        """One line as wide as the console; narrow ones lose the bar first, then the rest from the right."""
        metrics = self._last
        step = metrics.step if metrics else self._first_step - 1
        cells: list[Text | ProgressBar] = [Text(f"step {step}/{self._total_steps}")]
        if metrics is not None:
            cells.append(Text(f"loss {metrics.loss:.4f}", style="bold"))
            cells.append(Text(f"eta {self._time_left()}", style="cyan"))
            cells.append(Text(f"{format_count(metrics.tokens_per_second)} tok/s", style="green"))
        # The last column stays free: a full line makes some terminals wrap.
        room = self._console.width - 1
        while len(cells) > 1 and _width(cells) > room:
            cells.pop()
        bar_room = room - _width(cells) - 2
        if bar_room >= 8:
            cells.insert(1, ProgressBar(self._total_steps, step, width=min(_BAR_WIDTH, bar_room)))
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in cells:
            table.add_column(no_wrap=True)
        table.add_row(*cells)
        return table


def _width(cells: list[Text | ProgressBar]) -> int:
    """Columns that text cells take with two spaces after each."""
    return sum(cell.cell_len + 2 for cell in cells if isinstance(cell, Text))


def _log(text: str) -> None:
    _LOG.info("%s", text, extra={"shown_on_console": True})


def _not_shown_yet(record: logging.LogRecord) -> bool:
    return not getattr(record, "shown_on_console", False)


def _console_handlers() -> list[logging.StreamHandler[TextIO]]:
    """Handlers that this module's records reach and that write to standard output or error."""
    found: list[logging.StreamHandler[TextIO]] = []
    logger: logging.Logger | None = _LOG
    while logger is not None:
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream in (
                sys.stdout,
                sys.stderr,
                sys.__stdout__,
                sys.__stderr__,
            ):
                found.append(handler)
        logger = logger.parent if logger.propagate else None
    return found
