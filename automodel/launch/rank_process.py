"""A rank seen from the launcher: its process, and what comes through its pipes."""

from __future__ import annotations

import contextlib
import json
import os
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext

from automodel.launch.errors import EXIT_FAILED
from automodel.launch.failure import Failure
from automodel.launch.lifetime import DUMP_SIGNAL, SAVE_MESSAGE, STOP_MESSAGE
from automodel.launch.rank import RankJob, RankPipes, rank_main

KEPT_OUTPUT_BYTES = 16384
Source = Connection | int


class RankProcess:
    """Starts a rank and follows it.

    Rank 0 writes to the terminal. Of the others, whose words would repeat rank 0's, the last
    16 KiB are kept, to be shown should the rank die without an exception.

    Attributes:
        objective: the rank's result, once ``done``.
        failure: how the rank failed, or None.
        stacks: what faulthandler wrote.
    """

    def __init__(self, context: ForkServerContext, job: RankJob) -> None:
        self.rank = job.context.rank
        self.objective: float | None = None
        self.failure: Failure | None = None
        self.stacks = ""
        self._finished = False
        self._ended = False
        self._output = b""
        control, self._control = context.Pipe(duplex=False)
        self._report, report = context.Pipe(duplex=False)
        self._stacks, stacks = context.Pipe(duplex=False)
        pipes = [control, report, stacks]
        self._streams: list[Connection] = [self._stacks]
        output = None
        if self.rank > 0:
            self._output_pipe, output = context.Pipe(duplex=False)
            pipes.append(output)
            self._streams.append(self._output_pipe)
        self.stopped = False
        self._open: list[Connection] = [self._report, *self._streams]
        self._process = context.Process(
            target=rank_main, args=(job, RankPipes(control, report, stacks, output)), name=f"rank {self.rank}"
        )
        self._process.start()
        for pipe in pipes:
            pipe.close()

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def done(self) -> bool:
        """The rank reported a result and its process has ended well."""
        return self._finished and self._ended and self.failure is None

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def has_dumped(self) -> bool:
        return "most recent call first" in self.stacks or not self.alive

    def sources(self) -> list[Source]:
        """What to wait on: open pipes, and the process's end."""
        return [] if self._ended else [*self._open, self._process.sentinel]

    def receive(self, source: Source) -> None:
        """Take in what ``source`` has."""
        if source is self._report and source in self._open:
            self._receive_report()
        elif isinstance(source, Connection) and source in self._open:
            self._receive_stream(source)
        if not self.alive and not self._ended:
            self._drain()
            self._ended = True

    def request_stop(self) -> None:
        with contextlib.suppress(OSError):
            self._control.send_bytes(STOP_MESSAGE)

    def request_save(self) -> None:
        with contextlib.suppress(OSError):
            self._control.send_bytes(SAVE_MESSAGE)

    def request_stacks(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, DUMP_SIGNAL)

    def kill(self) -> None:
        if self.alive:
            self._process.kill()

    def close(self) -> None:
        """Wait for the killed process and close the pipes."""
        self._process.join(5.0)
        for pipe in (self._control, self._report, *self._streams):
            pipe.close()

    def _receive_report(self) -> None:
        try:
            message = json.loads(self._report.recv_bytes())
        except (EOFError, OSError):
            self._open.remove(self._report)
            return
        if "failure" in message:
            self.failure = Failure(**message["failure"])
        else:
            self.objective, self._finished = message["objective"], True
            self.stopped = bool(message["stopped"])

    def _receive_stream(self, source: Connection) -> None:
        data = os.read(source.fileno(), 65536)
        if not data:
            self._open.remove(source)
        elif source is self._stacks:
            self.stacks += data.decode(errors="replace")
        else:
            self._output = (self._output + data)[-KEPT_OUTPUT_BYTES:]

    def _drain(self) -> None:
        """After the process's end: read what it left, and judge an end without a word."""
        for pipe in list(self._open):
            while pipe in self._open and pipe.poll():
                self._receive_report() if pipe is self._report else self._receive_stream(pipe)
        code = self._process.exitcode
        if self.failure is None and (code != 0 or not self._finished):
            output = self._output.decode(errors="replace")
            self.failure = Failure.from_exit_code(self.rank, code if code is not None else EXIT_FAILED, output)
