"""``train.py``'s command line: compose, check, launch; and what its exit codes mean.

0 done; 1 the run failed; 2 the request is impossible and nothing was started; 130 after Ctrl-C;
143 after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from automodel.config.errors import ConfigError
from automodel.launch.arguments import Arguments, parse_arguments
from automodel.launch.context import LaunchContext, detect
from automodel.launch.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, RunFailed, Terminated
from automodel.launch.lifetime import SAVE_SIGNAL
from automodel.launch.program import Program

if TYPE_CHECKING:
    from automodel.launch.task import LocalTask


def main(argv: Sequence[str] | None = None, *, config_dir: Path, program: Program | None = None) -> int:
    """Do what the command line asks.

    Args:
        argv: the words after the program's name; None: this process's.
        config_dir: the folder of Hydra configs.
        program: what the ranks run.

    Returns:
        The exit code.
    """
    program = program or Program()
    try:
        arguments = parse_arguments(sys.argv[1:] if argv is None else argv, config_dir)
        context = detect(os.environ)
        if context.kind != "single":
            from automodel.launch import joined

            return joined.main(arguments, context, program)
        if threading.current_thread() is threading.main_thread():
            # Shells start background jobs with SIGINT ignored; while the ranks run it is heeded, so it is before too.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, _terminate)
            # A request for a checkpoint means something once the ranks run; until then it must not end the process.
            signal.signal(SAVE_SIGNAL, signal.SIG_IGN)
        return _main(arguments, program)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    except RunFailed as error:
        print(error.report, file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    except BrokenPipeError:
        # Whoever read the output has left, as `head` does. Keeps the interpreter's last flush quiet too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED
    finally:
        if sys.stderr.isatty():
            # A progress bar that was cut off leaves the cursor hidden.
            sys.stderr.write("\x1b[?25h")


def _main(arguments: Arguments, program: Program) -> int:
    # Imported late: every rank imports this module with train.py, and needs no Hydra; nor does --help.
    if arguments.help:
        from automodel.config.help import help_text

        print(help_text(arguments.config_path))
        return 0
    from automodel.launch.compose import run_hydra
    from automodel.launch.preflight import preflight
    from automodel.launch.resume import compose_continued
    from automodel.launch.task import JobFailed, LocalTask

    task = LocalTask(program)
    if not arguments.query and not arguments.multirun:
        arguments, container = compose_continued(arguments)
        task.plan = preflight(container, LaunchContext(), program)
    try:
        run_hydra(task, arguments)
    except JobFailed as failed:
        raise failed.error from None
    except Exception as error:
        if not any(error is told for told in task.failed.values()):
            raise
        return _sweep_failed(task)
    return 0


def _sweep_failed(task: LocalTask) -> int:
    numbers = ", ".join(str(number) for number in sorted(task.failed))
    print(f"{len(task.failed)} of {task.num_jobs} jobs failed: {numbers}", file=sys.stderr)
    refused = all(isinstance(error, ConfigError) for error in task.failed.values())
    return EXIT_REFUSED if refused and len(task.failed) == task.num_jobs else EXIT_FAILED


def _terminate(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Terminated
