"""The life of one rank of a local run, from its fork to its last report to the launcher."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import socket
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from automodel.config.schema import TrainConfig
from automodel.launch.context import LaunchContext
from automodel.launch.devices import DeviceType
from automodel.launch.errors import EXIT_FAILED
from automodel.launch.failure import Failure
from automodel.launch.lifetime import DUMP_SIGNAL, StopFlag, end_with_parent, follow_launcher
from automodel.launch.logs import configure_logging
from automodel.launch.program import Program, resolve
from automodel.launch.stacks import main_thread_header


@dataclass(frozen=True)
class RankJob:
    """All that a rank is given.

    Attributes:
        environment: the whole environment; the fork server's own may be older.
        num_threads: threads of torch's CPU operations.
        listener: on rank 0 of a world of two and more, the socket that the store listens on.
    """

    program: Program
    config: TrainConfig
    run_dir: Path
    context: LaunchContext
    device_type: DeviceType
    environment: dict[str, str]
    num_threads: int
    listener: socket.socket | None


@dataclass(frozen=True)
class RankPipes:
    """A rank's ends of its pipes. ``output`` is None where the rank writes to the terminal itself."""

    control: Connection
    report: Connection
    stacks: Connection
    output: Connection | None


def rank_main(job: RankJob, pipes: RankPipes) -> None:
    """Run ``job``; report its result or its error. Does not return after an error."""
    stop_requested = StopFlag()
    _prepare(job, pipes, stop_requested)
    try:
        if job.listener is not None:
            # Imported here: the launcher, which imports this module, stays free of torch.
            from automodel.launch import process_group

            process_group.adopt_listener(job.listener)
        objective = resolve(job.program.run)(job.config, job.run_dir, job.context, job.device_type, stop_requested)
    except SystemExit as error:
        # The launcher sees the code; without a report it knows that the run had not ended.
        _leave(error.code if isinstance(error.code, int) else EXIT_FAILED)
    except BaseException as error:
        failure = Failure.from_exception(job.context.rank, error)
        pipes.report.send_bytes(json.dumps({"failure": asdict(failure)}).encode())
        _leave(EXIT_FAILED)
    else:
        pipes.report.send_bytes(json.dumps({"objective": objective, "stopped": stop_requested()}).encode())
        logging.shutdown()


def _prepare(job: RankJob, pipes: RankPipes, stop_requested: StopFlag) -> None:
    end_with_parent()
    os.environ.clear()
    os.environ.update(job.environment)
    if pipes.output is not None:
        for descriptor in (1, 2):
            os.dup2(pipes.output.fileno(), descriptor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop_requested.set_on_signals()
    os.write(pipes.stacks.fileno(), main_thread_header().encode())
    faulthandler.enable(pipes.stacks.fileno())
    faulthandler.register(DUMP_SIGNAL, pipes.stacks.fileno(), all_threads=True)
    follow_launcher(pipes.control, stop_requested)
    if "torch" in sys.modules:
        # OMP_NUM_THREADS was read when the fork server imported torch.
        sys.modules["torch"].set_num_threads(job.num_threads)
    configure_logging(job.run_dir, job.context.rank, console=job.context.rank == 0)


def _leave(code: int) -> NoReturn:
    """End at once: no collective, no teardown that could wait for peers or threads."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
