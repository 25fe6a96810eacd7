"""The console: plain lines, the bar, the log, each once; and the closing summary."""

import io
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from automodel.launch.logs import configure_logging
from automodel.training.metrics import StepMetrics, ValidationMetrics
from automodel.training.progress import Progress
from automodel.training.summary import closing_summary, format_count, format_duration, printable

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(number: int, **changes) -> StepMetrics:
    values = {
        "step": number,
        "epoch": 0,
        "loss": 3.21,
        "grad_norm": 1.2,
        "lr": 3e-3,
        "num_label_tokens": 2048,
        "tokens_per_second": 9812.0,
        "step_time_s": 0.2,
        "peak_memory_bytes": 1,
    }
    return StepMetrics(**{**values, **changes})


def plain_console(**options) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, highlight=False, markup=False, width=20, **options)


def terminal(width: int) -> Console:
    return Console(
        file=io.StringIO(), force_terminal=True, width=width, highlight=False, markup=False, legacy_windows=False
    )


@contextmanager
def run_logging(run_dir: Path) -> Iterator[Path]:
    """A run's real logging, with its console handler on standard output; put back afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("automodel")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    root.handlers.clear()
    configure_logging(run_dir, rank=0, console=True)
    yield run_dir / "train.log"
    logging.captureWarnings(False)
    for handler in list(root.handlers):
        root.removeHandler(handler)
        handler.close()
    root.handlers.extend(handlers)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


def test_a_plain_line_is_never_wrapped() -> None:
    clock, console = Clock(), plain_console()
    with Progress(400, console=console, clock=clock) as progress:
        clock.now += 0.5
        progress.update(step(1, mfu=0.4123))
    assert console.file.getvalue() == ("step 1/400 loss 3.2100 norm 1.2 lr 3.0e-03 9.8k tok/s mfu 41.2% eta 3:20\n")


def test_plain_lines_come_every_log_every_steps_and_at_both_ends() -> None:
    console = plain_console()
    with Progress(23, log_every_steps=10, console=console) as progress:
        for number in range(1, 24):
            progress.update(step(number))
    assert re.findall(r"step (\d+)/23", console.file.getvalue()) == ["1", "10", "20", "23"]


def test_plain_lines_are_flushed_one_by_one() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(io.BufferedWriter(raw, 1 << 20))
    with Progress(2, console=Console(file=file, force_terminal=False)) as progress:
        progress.update(step(1))
        assert raw.getvalue().startswith(b"step 1/2")


def test_time_left_follows_the_pace_of_recent_steps() -> None:
    clock, console = Clock(), plain_console()
    with Progress(1000, console=console, clock=clock) as progress:
        for number in range(1, 101):
            clock.now += 100.0 if number == 1 else 2.0
            progress.update(step(number))
    assert console.file.getvalue().splitlines()[-1].endswith("eta 30:00")


def test_time_left_after_a_resume_counts_from_its_first_step() -> None:
    clock, console = Clock(), plain_console()
    with Progress(100, first_step=91, console=console, clock=clock) as progress:
        clock.now += 3.0
        progress.update(step(91))
    assert "step 91/100" in console.file.getvalue()
    assert "eta 0:27" in console.file.getvalue()


def test_each_line_is_once_on_the_console_and_once_in_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with run_logging(tmp_path) as log:
        progress = Progress(2)
        progress.message("before the bar")
        with progress:
            progress.update(step(1))
            logging.getLogger("automodel.elsewhere").info("from elsewhere")
            progress.validation(ValidationMetrics(1, 2.5, 10))
            progress.update(step(2))
        progress.message("the end")
        shown, logged = capsys.readouterr().out.splitlines(), log.read_text().splitlines()
    starts = [
        "before the bar",
        "step 1/2 loss",
        "from elsewhere",
        "step 1/2 validation loss 2.5000",
        "step 2/2 loss",
        "the end",
    ]
    assert len(shown) == len(logged) == len(starts)
    for start, line, entry in zip(starts, shown, logged, strict=True):
        assert line.startswith(start)
        assert f" INFO {start}" in entry


def test_messages_are_shown_as_they_are_without_markup_or_control() -> None:
    console = plain_console()
    with Progress(2, console=console) as progress:
        progress.message("[bold]x[/bold] :smile: \x1b[2J")
    assert console.file.getvalue() == "[bold]x[/bold] :smile: \\x1b[2J\n"


def test_a_console_that_lacks_a_character_gets_its_escape() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with Progress(2, console=Console(file=file, force_terminal=False)) as progress:
        progress.message("na\u00efve")
    assert file.buffer.getvalue() == b"na\\xefve\n"


@pytest.mark.parametrize("width", [12, 24, 40, 60, 80, 200])
def test_the_bar_fits_the_terminal(width: int) -> None:
    console = terminal(width)
    with Progress(400, console=console) as progress:
        for number in (1, 400):
            progress.update(step(number))
    drawn = ESCAPE.sub("", console.file.getvalue()).replace("\r", "\n").split("\n")
    assert all(len(line) <= width for line in drawn)
    last = [line for line in drawn if line.strip()][-1]
    assert "step 400/400"[: width - 2] in last
    assert ("loss 3.2100" in last) == (width >= 30)
    assert ("tok/s" in last) == (width >= 60)
    assert ("\u2501" in last) == (width >= 60)


def test_the_cursor_stays_visible_while_the_bar_is_up() -> None:
    console = terminal(80)
    with Progress(400, console=console) as progress:
        progress.update(step(1))
        written = console.file.getvalue()
    assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")


def test_the_bar_is_redrawn_a_few_times_a_second_at_most() -> None:
    clock, console = Clock(), terminal(80)
    with Progress(10_000, console=console, clock=clock, log_every_steps=1000) as progress:
        for number in range(1, 1001):
            clock.now += 0.001
            progress.update(step(number))
        assert 2 <= console.file.getvalue().count("tok/s") <= 8


def test_on_a_terminal_logging_appears_above_the_bar_and_steps_only_in_the_log(tmp_path: Path) -> None:
    console = terminal(100)
    with run_logging(tmp_path) as log:
        before = sys.stdout
        with Progress(4, console=console) as progress:
            for number in range(1, 5):
                progress.update(step(number))
            logging.getLogger("automodel.elsewhere").warning("a warning")
        (handler,) = (h for h in logging.getLogger().handlers if type(h) is logging.StreamHandler)
        assert handler.stream is sys.stdout is before
        shown, logged = console.file.getvalue(), log.read_text()
    assert shown.count("a warning\n") == 1
    assert "norm" not in shown
    assert logged.count("a warning") == 1
    assert len(re.findall(r"step \d/4 loss", logged)) == 4


def train_and_fail(console: Console) -> None:
    with Progress(4, console=console) as progress:
        progress.update(step(1))
        raise RuntimeError("training failed")


def test_an_error_inside_leaves_the_console_as_it_was() -> None:
    console, before = terminal(80), sys.stdout
    with pytest.raises(RuntimeError, match="training failed"):
        train_and_fail(console)
    assert sys.stdout is before
    assert console.file.getvalue().endswith("\n\x1b[?25h")


def test_the_summary_names_losses_text_folder_and_time() -> None:
    text = closing_summary(
        num_steps=400,
        first_loss=5.61234,
        last_loss=1.75,
        val_loss_at_start=5.5,
        val_loss_at_end=1.8,
        generated_text="def f(x):\n\treturn x\x1b[31m\n\nrun folder  elsewhere",
        run_dir=Path("outputs/run"),
        seconds=112.4,
    )
    assert text.splitlines() == [
        "loss             5.6123 -> 1.7500 in 400 steps",
        "validation loss  5.5000 -> 1.8000",
        "generated text",
        "  | def f(x):",
        "  |     return x\\x1b[31m",
        "  |",
        "  | run folder  elsewhere",
        "run folder       outputs/run",
        "time             1:52",
    ]


def test_the_summary_leaves_out_what_was_not_measured() -> None:
    text = closing_summary(
        num_steps=0,
        first_loss=None,
        last_loss=None,
        val_loss_at_start=None,
        val_loss_at_end=None,
        generated_text=None,
        run_dir=Path("run"),
        seconds=3725.0,
    )
    assert text.splitlines() == ["run folder       run", "time             1:02:05"]


def test_printable_escapes_what_steers_a_terminal_and_keeps_what_is_read() -> None:
    assert printable("a\r\nb\tc\r\x07\x9b\u202e\u2028\ud800") == "a\nb    c\\r\\x07\\x9b\\u202e\\u2028\\ud800"
    assert printable("gr\u00fc\u00df \u4f60\u597d \u2603") == "gr\u00fc\u00df \u4f60\u597d \u2603"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.4, "0"), (999, "999"), (999.6, "1.0k"), (9812, "9.8k"), (123456, "123k"), (999_960, "1.0M"), (3.4e9, "3.4G")],
)
def test_counts_have_three_digits_at_most(value: float, shown: str) -> None:
    assert format_count(value) == shown


@pytest.mark.parametrize(("seconds", "shown"), [(-1, "0:00"), (0.6, "0:01"), (72, "1:12"), (7384, "2:03:04")])
def test_durations(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown
