"""A rank that another launcher started (torchrun, srun): joins its peers and runs its part.

Hydra runs in rank 0 alone, so that there is one run folder and one log whenever the ranks start.
Rank 0 announces the checked config and the folder through the store; the others wait for it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from automodel.config.errors import ConfigError
from automodel.config.help import help_text
from automodel.config.schema import TrainConfig, load
from automodel.launch.arguments import Arguments
from automodel.launch.compose import run_hydra
from automodel.launch.context import LaunchContext
from automodel.launch.devices import DeviceType
from automodel.launch.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED, EXIT_TERMINATED
from automodel.launch.failure import Failure
from automodel.launch.lifetime import StopFlag
from automodel.launch.logs import append_text, configure_logging
from automodel.launch.preflight import Plan, preflight
from automodel.launch.program import Program, resolve
from automodel.launch.resume import compose_continued

if TYPE_CHECKING:
    from torch.distributed import Store

# The config, with its own time-out, is not known yet when the ranks meet.
MEETING_TIMEOUT = datetime.timedelta(minutes=10)
FAREWELL_SECONDS = 30.0
PEER_ERROR_SECONDS = 1.0
ANNOUNCEMENT, READ, FAILURE = "announcement", "announcement_read", "failure"


def main(arguments: Arguments, context: LaunchContext, program: Program) -> int:
    """Run this rank.

    Returns:
        The exit code. After an error in the run this does not return: the process ends at once.

    Raises:
        ConfigError: rank 0's request is impossible; the other ranks exit with the same code, silently.
    """
    if arguments.help or arguments.query:
        return _query(arguments) if context.rank == 0 else 0
    stop_requested = StopFlag()
    stop_requested.set_on_signals()
    signal.signal(signal.SIGINT, lambda *_: _interrupted(context))
    rank = JoinedRank(arguments, context, program, stop_requested)
    if context.rank == 0:
        rank.lead()
    else:
        rank.follow()
    return EXIT_TERMINATED if stop_requested() else 0


def _query(arguments: Arguments) -> int:
    if arguments.help:
        print(help_text(arguments.config_path))
    else:
        run_hydra(lambda _: None, arguments)
    return 0


def _interrupted(context: LaunchContext) -> NoReturn:
    if context.rank == 0:
        print("\ninterrupted", file=sys.stderr, flush=True)
    os._exit(EXIT_INTERRUPTED)


@dataclass
class JoinedRank:
    """One rank of a world that exists already."""

    arguments: Arguments
    context: LaunchContext
    program: Program
    stop_requested: StopFlag
    announced: bool = False

    def lead(self) -> None:
        """Rank 0: check the request, make the run folder through Hydra, tell the others, run."""
        try:
            if self.arguments.multirun:
                raise ConfigError(
                    "--multirun",
                    f"{self.context.world_size} processes",
                    f"{self.context.kind} has started the ranks of one run, a sweep starts its own",
                    "plain python train.py -m ..., or one job without -m",
                )
            continued, container = compose_continued(self.arguments)
            plan = preflight(container, self.context, self.program)
        except BaseException as error:
            self._dismiss(EXIT_REFUSED if isinstance(error, ConfigError) else EXIT_FAILED)
            raise
        try:
            run_hydra(lambda _: self._run_in_folder(plan), continued)
        except BaseException:
            if not self.announced:
                # Hydra could not make the folder: the others must not wait for a word that never comes.
                self._dismiss(EXIT_FAILED)
            raise

    def _run_in_folder(self, plan: Plan) -> float | None:
        from hydra.core.hydra_config import HydraConfig

        run_dir = Path(HydraConfig.get().runtime.output_dir)
        self._announce(
            {
                "argv": self.arguments.argv,
                "config": plan.container,
                "run_dir": str(run_dir),
                "device": plan.device,
            }
        )
        return self.run(plan.config, run_dir, plan.device)

    def follow(self) -> None:
        """Any other rank: wait for rank 0's word."""
        store = self._store()
        store.set_timeout(MEETING_TIMEOUT)
        message = json.loads(store.get(ANNOUNCEMENT))
        store.add(READ, 1)
        if "exit_code" in message:
            raise SystemExit(message["exit_code"])
        if tuple(message["argv"]) != self.arguments.argv:
            raise ConfigError(
                f"command line of rank {self.context.rank}",
                " ".join(self.arguments.argv),
                "every rank must be started with the same words",
                " ".join(message["argv"]) or "no words",
            )
        self.run(load(message["config"]), Path(message["run_dir"]), message["device"])

    def run(self, config: TrainConfig, run_dir: Path, device: DeviceType) -> float | None:
        """Run this rank's part; after an error, tell it and end the process."""
        from torch.distributed.elastic.multiprocessing.errors import record

        configure_logging(run_dir, self.context.rank, console=self.context.rank == 0)
        if self.context.world_size > 1:
            self._end_with_failed_peers()
        try:
            # torchrun reads the error from the file that `record` writes.
            return record(resolve(self.program.run))(config, run_dir, self.context, device, self.stop_requested)
        except Exception as error:
            self._fail(run_dir, error)

    def _store(self) -> Store:
        from automodel.launch.process_group import connect_store

        return connect_store(self.context, MEETING_TIMEOUT)

    def _announce(self, message: dict[str, Any]) -> None:
        self.announced = True
        if self.context.world_size > 1:
            self._store().set(ANNOUNCEMENT, json.dumps(message))

    def _dismiss(self, exit_code: int) -> None:
        """Tell the others to leave, and stay until they know, since this rank may serve the store."""
        if self.context.world_size == 1:
            return
        self._announce({"exit_code": exit_code})
        deadline = time.monotonic() + FAREWELL_SECONDS
        while self._store().add(READ, 0) < self.context.world_size - 1 and time.monotonic() < deadline:
            time.sleep(0.05)

    def _fail(self, run_dir: Path, error: Exception) -> NoReturn:
        """One rank tells the error: the first that did not merely lose its peer."""
        failure = Failure.from_exception(self.context.rank, error)
        refused = failure.kind == "config"
        if self._is_first(wait=failure.kind == "peer"):
            text = str(error) if refused else f"the run failed: {failure.headline}\n\n{failure.traceback}"
            print(text, file=sys.stderr)
            append_text(run_dir, text)
            if not refused:
                (run_dir / "error.txt").write_text(text.rstrip() + "\n")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(EXIT_REFUSED if refused else EXIT_FAILED)

    def _is_first(self, wait: bool) -> bool:
        if self.context.world_size == 1:
            return True
        try:
            store = self._store()
            store.set_timeout(datetime.timedelta(seconds=5))
            if wait:
                time.sleep(PEER_ERROR_SECONDS)
            return store.add(FAILURE, 1) == 1
        except Exception:
            # The store went with its rank: nobody else can be asked.
            return True

    def _end_with_failed_peers(self) -> None:
        """Once told to stop, end at once if a peer has failed.

        torchrun sends the same signal to ask for an orderly end and to clear away the peers of a
        failed rank, which may hang in a collective and are given 30 seconds.
        """
        store = self._store().clone()  # type: ignore[attr-defined]

        def watch() -> None:
            self.stop_requested.wait()
            # The store goes when its rank or torchrun's agent does: there is nobody left to ask.
            with contextlib.suppress(Exception):
                while store.add(FAILURE, 0) == 0:
                    time.sleep(0.2)
                os._exit(EXIT_FAILED)

        threading.Thread(target=watch, name="end_with_failed_peers", daemon=True).start()
