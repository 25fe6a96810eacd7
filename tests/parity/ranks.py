"""Ranks that are started once and run many cases."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from multiprocessing.connection import Connection, wait
from typing import Any

CASE_TIMEOUT_SECONDS = 120.0
PRELOAD = ["torch", "transformers.models.llama.modeling_llama", "tests.parity.cases"]


def _rank_main(rank: int, world_size: int, listener: socket.socket, connection: Connection) -> None:
    """Join the group, then run whatever function comes through the pipe, until it closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    address = listener.getsockname()
    store = dist.TCPStore(
        address[0],
        address[1],
        is_master=rank == 0,
        timeout=datetime.timedelta(seconds=60),
        wait_for_workers=False,
        **({"master_listen_fd": listener.detach()} if rank == 0 else {}),
    )
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=CASE_TIMEOUT_SECONDS / 2),
    )
    # Each gloo group keeps a thread that wakes a hundred times a second, as long as any cache knows its mesh: cases
    # with equal sizes share one mesh, or those of past cases would take the processor.
    from automodel.distributed import setup

    setup.create_device_mesh = functools.cache(setup.create_device_mesh)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments, fault = connection.recv()
            # A hang ends by itself, and each rank shows where it waited.
            faulthandler.dump_traceback_later(CASE_TIMEOUT_SECONDS * 0.9, exit=True, file=sys.__stderr__)
            try:
                with _fault(fault):
                    result = _resolve(function)(*arguments)
                connection.send(("ok", result if rank == 0 else None))
            except BaseException:
                connection.send(("error", f"rank {rank}:\n{traceback.format_exc()}"))
            finally:
                faulthandler.cancel_dump_traceback_later()
    os._exit(0)


def _resolve(dotted: str) -> Any:
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)


def _fault(dotted: str | None) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if dotted is None else _resolve(dotted)()


class Ranks:
    """``world_size`` processes joined by gloo on the loopback.

    After an error the group's state is unknown, so the processes are replaced at the next call.
    """

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def _start(self) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(2 * self.world_size)
            for rank in range(self.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main,
                    args=(rank, self.world_size, listener, theirs),
                    daemon=True,
                    name=f"parity rank {rank}",
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._connections.append(ours)

    def run(self, function: str, *arguments: Any, fault: str | None = None) -> Any:
        """Call ``module:function`` on all ranks; rank 0's result.

        Raises:
            RuntimeError: with every rank's own error, or that a rank died or did not answer.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, arguments, fault))
        results: dict[int, Any] = {}
        errors: list[str] = []
        pending = dict(enumerate(self._connections))
        timeout = CASE_TIMEOUT_SECONDS
        while pending:
            ready = wait(list(pending.values()), timeout)
            if not ready:
                errors.append(f"ranks {sorted(pending)} gave no answer within {timeout} s")
                break
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                connection = pending.pop(rank)
                try:
                    status, value = connection.recv()
                except EOFError:
                    self._processes[rank].join(5)
                    status, value = "error", f"rank {rank} died with exit code {self._processes[rank].exitcode}"
                if status == "error":
                    errors.append(value)
                    # The others wait for this one: they get a moment to fail by themselves.
                    timeout = 5.0
                results[rank] = value
        if errors:
            self.close()
            raise RuntimeError("\n".join(errors))
        return results[0]

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
