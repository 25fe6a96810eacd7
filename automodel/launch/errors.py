"""How a run can end before its time."""

from __future__ import annotations

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class RunFailed(Exception):
    """A rank failed, and with it the run.

    Args:
        report: what a person reads: the rank at fault, its error and traceback, and where each of
            the others was.
        details: ``report`` and the full stacks of all ranks, for ``error.txt``.
    """

    def __init__(self, report: str, details: str | None = None) -> None:
        self.report = report
        self.details = details or report
        super().__init__(report)

    def __reduce__(self) -> tuple[type[RunFailed], tuple[str, str]]:
        return RunFailed, (self.report, self.details)


class Terminated(SystemExit):
    """The run was asked to end with SIGTERM and did. Passes through ``except Exception``."""

    def __init__(self) -> None:
        super().__init__(EXIT_TERMINATED)
