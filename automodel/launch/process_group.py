"""The ranks' meeting: the store, the default process group, and an orderly end."""

from __future__ import annotations

import datetime
import socket

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from automodel.launch.context import LaunchContext

_listener: socket.socket | None = None
_store: dist.Store | None = None


def adopt_listener(listener: socket.socket) -> None:
    """Take over the listening socket that the launcher bound; rank 0 serves the store on it.

    Bound before any rank starts, it cannot lose its port to another process, and it listens on the
    loopback only, where torch's own store would listen on every interface.
    """
    global _listener
    _listener = listener


def connect_store(context: LaunchContext, timeout: datetime.timedelta) -> dist.Store:
    """The store shared by all ranks of a world of two and more; made at the first call.

    Raises:
        torch.distributed.DistError: no connection within ``timeout``.
    """
    global _store
    if _store is None:
        _store = _make_store(context, timeout)
    return _store


def _make_store(context: LaunchContext, timeout: datetime.timedelta) -> dist.Store:
    if context.kind == "torchrun":
        # Knows whether torchrun's agent already serves the store on the master's port.
        store, _, _ = next(dist.rendezvous("env://", rank=context.rank, world_size=context.world_size, timeout=timeout))
        return dist.PrefixStore(f"restart_{context.restart}", store)
    if context.kind == "local" and context.rank == 0:
        if _listener is None:
            raise RuntimeError("rank 0 of a local run needs the launcher's listening socket")
        return dist.TCPStore(
            context.master_addr,
            context.master_port,
            context.world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            # Detached, since the store closes the descriptor at its end.
            master_listen_fd=_listener.detach(),
        )
    return dist.TCPStore(
        context.master_addr,
        context.master_port,
        context.world_size,
        is_master=context.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )


def initialize(context: LaunchContext, device_type: str, timeout: datetime.timedelta) -> None:
    """Create the default process group: gloo on CPU; on CUDA nccl, with gloo for CPU tensors.

    A world of one process needs no group, and gets none; on CUDA its device is set. Collective.

    Args:
        context: this rank's place.
        device_type: ``cpu`` or ``cuda``.
        timeout: of every collective, in this group and in those made later.
    """
    device: torch.device | None = None
    if device_type == "cuda":
        # A scheduler may show each task only its own GPU, which then has index 0.
        device = torch.device("cuda", context.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    if context.world_size == 1:
        return
    _set_default_timeouts(timeout)
    store = dist.PrefixStore("process_group", connect_store(context, timeout))
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device else "gloo",
        store=store,
        rank=context.rank,
        world_size=context.world_size,
        timeout=timeout,
        device_id=device,
    )


def _set_default_timeouts(timeout: datetime.timedelta) -> None:
    """Make ``timeout`` the default of groups made later, e.g. by ``init_device_mesh``.

    ``new_group`` falls back to these two module values instead of the default group's own timeout,
    and ``init_device_mesh`` cannot pass one. Not public: tried with torch 2.13.
    """
    distributed_c10d.default_pg_timeout = timeout
    distributed_c10d.default_pg_nccl_timeout = timeout


def shutdown() -> None:
    """End together: finish this rank's work, wait for the others, destroy the groups. Collective.

    A rank that has failed must not call this; its peers may be anywhere.
    """
    global _store
    if dist.is_initialized():
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()
        dist.barrier()
        dist.destroy_process_group()
    _store = None
