"""Plain python: start one process per device on this host, watch them, and end them together."""

from __future__ import annotations

import multiprocessing.connection
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from automodel.config.errors import ConfigError
from automodel.config.schema import TrainConfig
from automodel.launch import forkserver
from automodel.launch.context import LaunchContext
from automodel.launch.devices import DeviceType
from automodel.launch.errors import RunFailed, Terminated
from automodel.launch.failure import Failure, compose_report, root_cause
from automodel.launch.lifetime import SignalWatch
from automodel.launch.program import Program
from automodel.launch.rank import RankJob
from automodel.launch.rank_process import RankProcess

LOOPBACK = "127.0.0.1"
# A rank's end makes its peers raise within milliseconds: wait for them, to name the first.
SETTLE_SECONDS = 0.5
STACK_SECONDS = 0.5


def run_local(
    config: TrainConfig,
    run_dir: Path,
    world_size: int,
    device: DeviceType,
    program: Program | None = None,
) -> float | None:
    """Run ``config`` in ``world_size`` processes of this host.

    They meet and listen on the loopback only. SIGTERM asks all ranks to stop after a step, SIGUSR1 to
    save a checkpoint and go on; Ctrl-C ends them at once. No rank outlives this call, or this process. A
    script that calls this needs the usual ``if __name__ == "__main__":`` of multiprocessing.

    Args:
        run_dir: existing folder; after a failure it holds ``error.txt``.
        device: ``cuda`` gives rank r the GPU of index r.
        program: what the ranks run.

    Returns:
        Rank 0's objective.

    Raises:
        RunFailed: a rank failed; all others were ended.
        ConfigError: a rank refused the request.
        Terminated: the ranks stopped after SIGTERM.
        KeyboardInterrupt: after Ctrl-C, once all ranks have ended.
    """
    program = program or Program()
    run_dir = run_dir.resolve()
    context = forkserver.start(program.modules_for(config))
    listener = _listen() if world_size > 1 else None
    ranks: list[RankProcess] = []
    with SignalWatch().installed() as signals:
        try:
            for job in _jobs(config, run_dir, world_size, device, program, listener):
                ranks.append(RankProcess(context, job))
            if listener:
                listener.close()
            _watch(ranks, signals, run_dir, grace_seconds=60.0 * config.launch.timeout_minutes)
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.close()
    # A SIGTERM that reached a single rank stopped them all, just as one that reached this process.
    if signals.terminated or any(process.stopped for process in ranks):
        raise Terminated
    return ranks[0].objective


def _jobs(
    config: TrainConfig,
    run_dir: Path,
    world_size: int,
    device: DeviceType,
    program: Program,
    listener: socket.socket | None,
) -> Iterator[RankJob]:
    port = listener.getsockname()[1] if listener else 0
    for rank in range(world_size):
        context = LaunchContext(
            kind="local",
            rank=rank,
            world_size=world_size,
            local_rank=rank,
            local_world_size=world_size,
            master_addr=LOOPBACK,
            master_port=port,
        )
        yield RankJob(
            program=program,
            config=config,
            run_dir=run_dir,
            context=context,
            device_type=device,
            environment=rank_environment(os.environ, context, device),
            num_threads=num_threads(os.environ, world_size),
            listener=listener if rank == 0 else None,
        )


def rank_environment(environ: Mapping[str, str], context: LaunchContext, device: DeviceType) -> dict[str, str]:
    """The environment of one rank of a local run.

    torchrun's variables say where it is; those of Slurm and submitit are removed, since they
    describe the launcher. gloo and NCCL are told to use the loopback unless the user chose. A run
    on the CPU sees no GPU, so that no library puts a context on one.
    """
    result = {k: v for k, v in environ.items() if not k.startswith(("SLURM_", "SUBMITIT_"))}
    result.update(
        RANK=str(context.rank),
        LOCAL_RANK=str(context.local_rank),
        WORLD_SIZE=str(context.world_size),
        LOCAL_WORLD_SIZE=str(context.local_world_size),
        MASTER_ADDR=context.master_addr,
        MASTER_PORT=str(context.master_port),
    )
    if device == "cpu":
        result["CUDA_VISIBLE_DEVICES"] = ""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    result.setdefault("GLOO_SOCKET_IFNAME", loopback)
    result.setdefault("NCCL_SOCKET_IFNAME", loopback)
    result.setdefault("OMP_NUM_THREADS", str(num_threads(environ, context.local_world_size)))
    return result


def num_threads(environ: Mapping[str, str], num_ranks: int) -> int:
    """Threads of one rank: the user's OMP_NUM_THREADS, else an equal share of this process's cores."""
    chosen = environ.get("OMP_NUM_THREADS", "")
    if chosen.isdigit() and int(chosen) > 0:
        return int(chosen)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // num_ranks)


def _listen() -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((LOOPBACK, 0))
    listener.listen(1024)
    return listener


def _watch(ranks: list[RankProcess], signals: SignalWatch, run_dir: Path, grace_seconds: float) -> None:
    """Wait until all ranks are done; raises for the first that fails, or for a signal.

    Args:
        grace_seconds: after SIGTERM, for the ranks to finish their step and save; a second SIGTERM ends them at once.
    """
    deadline = None
    saves_forwarded = 0
    while not all(rank.done for rank in ranks):
        _pump(ranks, signals, None if deadline is None else max(0.0, deadline - time.monotonic()))
        if any(rank.failure for rank in ranks):
            raise _failed(ranks, signals, run_dir)
        if signals.interrupted or signals.terminated > 1:
            raise KeyboardInterrupt if signals.interrupted else Terminated
        if signals.saves_requested > saves_forwarded:
            saves_forwarded = signals.saves_requested
            for rank in ranks:
                rank.request_save()
        if signals.terminated and deadline is None:
            deadline = time.monotonic() + grace_seconds
            for rank in ranks:
                rank.request_stop()
        if deadline is not None and time.monotonic() >= deadline:
            print(f"the ranks did not stop within {grace_seconds:.0f} s and were killed", file=sys.stderr)
            raise Terminated


def _pump(ranks: list[RankProcess], signals: SignalWatch, timeout: float | None) -> None:
    """Wait for anything from any rank, or a signal, and take it in."""
    sources: dict[Any, RankProcess] = {source: rank for rank in ranks for source in rank.sources()}
    ready: list[Any] = multiprocessing.connection.wait([*sources, signals.fileno()], timeout)
    signals.clear()
    for source in ready:
        if source in sources:
            sources[source].receive(source)


def _failed(ranks: list[RankProcess], signals: SignalWatch, run_dir: Path) -> Exception:
    """End all ranks; the error that tells what happened."""
    settled = time.monotonic() + SETTLE_SECONDS
    while (rest := settled - time.monotonic()) > 0 and not all(r.done or r.failure for r in ranks):
        _pump(ranks, signals, rest)
    failures: list[Failure] = [rank.failure for rank in ranks if rank.failure]
    running = [rank for rank in ranks if rank.alive and not rank.failure]
    for rank in running:
        rank.request_stacks()
    answered = time.monotonic() + STACK_SECONDS
    while (rest := answered - time.monotonic()) > 0 and not all(rank.has_dumped for rank in running):
        _pump(running, signals, rest)
    for rank in ranks:
        rank.kill()
    root = root_cause(failures)
    if root.kind == "config":
        return ConfigError(**root.config_error)
    report, details = compose_report(failures, {rank.rank: rank.stacks for rank in running}, len(ranks))
    (run_dir / "error.txt").write_text(details + "\n")
    return RunFailed(report, details)
