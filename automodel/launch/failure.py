"""What a failed rank tells, which of several failures is the cause, and the report of it."""

from __future__ import annotations

import re
import signal
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from automodel.config.errors import ConfigError
from automodel.launch.stacks import describe_stack, where

FailureKind = Literal["config", "timeout", "peer", "error", "exit"]

# gloo, NCCL and the store have no exception classes of their own for these.
_TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)
_PEER = re.compile(
    r"connection (was )?(closed|reset|refused|aborted|shut down)|broken pipe|socket closed|remote process exited"
    r"|ncclRemoteError|ncclSystemError|failed to (recv|send)|recvValue failed|sendBytes failed|connectFullMesh failed"
    r"|peer (has )?(closed|reset|exited)|communicator was aborted",
    re.IGNORECASE,
)
_LAUNCHER_FILES = ("launch/rank.py", "launch/joined.py", "multiprocessing/errors/__init__.py")
_COMMUNICATION_TYPES = ("DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "RuntimeError")


@dataclass
class Failure:
    """One rank's end.

    Attributes:
        kind: ``config``: an impossible request found late; ``timeout``: a collective did not end in
            time; ``peer``: another rank's end broke a connection; ``error``: any other exception;
            ``exit``: the process ended without an exception.
        message: the exception's text, or how the process ended.
        time: seconds since the epoch.
        config_error: the fields of a ConfigError.
        output: the last lines that the process wrote.
    """

    rank: int
    kind: FailureKind
    type: str
    message: str
    traceback: str = ""
    time: float = 0.0
    config_error: dict[str, Any] = field(default_factory=dict)
    output: str = ""

    @classmethod
    def from_exception(cls, rank: int, error: BaseException) -> Failure:
        fields: dict[str, Any] = {}
        if isinstance(error, ConfigError):
            fields = {
                "key": error.key,
                "value": str(error.value),
                "rule": error.rule,
                "legal": error.legal,
                "hint": error.hint,
            }
        text = "".join(traceback.format_exception(type(error), error, _without_launcher(error.__traceback__)))
        return cls(rank, classify(error), type(error).__name__, str(error), text, time.time(), fields)

    @classmethod
    def from_exit_code(cls, rank: int, exit_code: int, output: str = "") -> Failure:
        return cls(rank, "exit", "exit", describe_exit(exit_code), time=time.time(), output=output)

    @property
    def headline(self) -> str:
        if self.kind == "exit":
            return f"rank {self.rank} {self.message}"
        first, *rest = self.message.strip().splitlines() or [""]
        return f"rank {self.rank} raised {self.type}: {first}{' ...' if rest else ''}"


def _without_launcher(trace: TracebackType | None) -> TracebackType | None:
    """A traceback that begins in the program: the launcher's own calls say nothing about the error."""
    first = trace
    while first is not None and first.tb_frame.f_code.co_filename.endswith(_LAUNCHER_FILES):
        first = first.tb_next
    return first or trace


def classify(error: BaseException) -> FailureKind:
    """What kind of failure an exception is, looking through ``raise ... from``."""
    if isinstance(error, ConfigError):
        return "config"
    if isinstance(error, SystemExit):
        return "exit"
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionError):
            return "peer"
        if type(cause).__name__ in _COMMUNICATION_TYPES:
            if _PEER.search(str(cause)):
                return "peer"
            if _TIMEOUT.search(str(cause)):
                return "timeout"
        cause = cause.__cause__
    return "error"


def describe_exit(exit_code: int) -> str:
    """How a process ended that told nothing: ``was killed by SIGKILL (...)`` or ``exited with code 3``."""
    if exit_code >= 0:
        return f"exited with code {exit_code} before the run had ended"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = ": by a person, or by the kernel when memory ran out (see dmesg)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """The failure that made the others fail: the earliest that is not a broken connection or a
    time-out, else the earliest time-out, else the earliest.

    SIGABRT gives way to anything else: it is also how a communication library ends a process whose
    peer is gone.
    """

    def order(failure: Failure) -> tuple[int, float]:
        if failure.kind == "exit" and "SIGABRT" in failure.message:
            return 1, failure.time
        return {"timeout": 2, "peer": 3}.get(failure.kind, 0), failure.time

    return min(failures, key=order)


def compose_report(failures: Sequence[Failure], stacks: Mapping[int, str], world_size: int) -> tuple[str, str]:
    """The report for the terminal and the longer one for ``error.txt``.

    Args:
        failures: every failed rank.
        stacks: rank -> the Python stacks of ranks that were still running.
    """
    root = root_cause(failures)
    by_rank = {failure.rank: failure for failure in failures}
    lines = [f"the run failed: {root.headline}", ""]
    if root.kind == "timeout":
        lines[0] = "the run failed: a collective did not end in time; ranks waited for each other:"
    else:
        lines += [root.traceback.rstrip(), ""] if root.traceback else []
        if root.output:
            lines += [f"last output of rank {root.rank}:", root.output.rstrip(), ""]
    others = [rank for rank in range(world_size) if rank != root.rank or root.kind == "timeout"]
    for rank in others:
        lines.append(f"  rank {rank}: {_other(by_rank.get(rank), stacks.get(rank, ''), root)}")
    report = "\n".join(lines).rstrip()
    details = [report]
    for rank in range(world_size):
        other = by_rank.get(rank)
        text = (other.traceback or other.output) if other else describe_stack(stacks.get(rank, ""))
        if text.strip() and (rank != root.rank or root.kind == "timeout"):
            details.append(f"--- rank {rank} ---\n{text.rstrip()}")
    return report, "\n\n".join(details)


def _other(failure: Failure | None, stack: str, root: Failure) -> str:
    if failure is None:
        return f"was in {where(stack)}" if describe_stack(stack) else "gave no answer, or had ended"
    if failure.kind == "timeout":
        return f"timed out in {where(failure.traceback)}"
    if failure.kind == "peer":
        return f"lost its connection in {where(failure.traceback)}"
    if failure.rank != root.rank and failure.kind == "error" and failure.message == root.message:
        return "ended with the same error"
    return failure.headline.removeprefix(f"rank {failure.rank} ")
