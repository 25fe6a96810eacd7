"""Where am I? How this process was started, and what its rank, world and address are. Without torch."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

LaunchKind = Literal["single", "local", "torchrun", "srun", "submitit_slurm", "submitit_local"]

TORCHRUN_VARIABLES = frozenset({"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
# Below the usual range of outgoing connections (32768 and up), so that none of them holds the port.
FIRST_PORT, NUM_PORTS = 20000, 12000


@dataclass(frozen=True)
class LaunchContext:
    """One process's place in its run.

    Attributes:
        kind: ``single``: one plain process, no ranks yet; ``local``: a rank that
            :func:`automodel.launch.local.run_local` started; the others name the launcher that
            started every rank.
        local_world_size: ranks on this host.
        node_rank: index of this host among ``num_nodes``.
        master_port: 0 where no rendezvous by port takes place.
        restart: how many times this job was started again.
    """

    kind: LaunchKind = "single"
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    job_id: str = ""
    restart: int = 0


def detect(environ: Mapping[str, str]) -> LaunchContext:
    """Read the launch context from environment variables.

    The order matters: torchrun may itself run inside an srun step or a submitit job, and
    submitit's local executor inside a Slurm allocation.
    """
    if "TORCHELASTIC_RUN_ID" in environ or environ.keys() >= TORCHRUN_VARIABLES:
        return _torchrun(environ)
    if environ.get("SUBMITIT_EXECUTOR") == "local" and "SUBMITIT_LOCAL_GLOBALID" in environ:
        return _submitit_local(environ)
    if _is_srun_task(environ):
        return _srun(environ)
    return LaunchContext()


def expand_nodelist(nodelist: str) -> list[str]:
    """Slurm's compressed list of hosts, ``n[01-02,5],login``, as names."""
    names: list[str] = []
    for part in re.findall(r"[^,\[]+(?:\[[^\]]*\][^,\[]*)*", nodelist):
        match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", part)
        if not match:
            names.append(part)
            continue
        before, ranges, after = match.groups()
        endings = expand_nodelist(after) if after else [""]
        for item in ranges.split(","):
            first, _, last = item.partition("-")
            for number in range(int(first), int(last or first) + 1):
                names += [f"{before}{number:0{len(first)}}{ending}" for ending in endings]
    return names


def _number(environ: Mapping[str, str], name: str, default: int = 0) -> int:
    return int(environ.get(name) or default)


def _port(*key: object) -> int:
    """A port that every rank of a job derives alike, without talking to the others."""
    return FIRST_PORT + zlib.crc32("/".join(map(str, key)).encode()) % NUM_PORTS


def _torchrun(environ: Mapping[str, str]) -> LaunchContext:
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", 1)
    world_size = _number(environ, "WORLD_SIZE", 1)
    return LaunchContext(
        kind="torchrun",
        rank=_number(environ, "RANK"),
        world_size=world_size,
        local_rank=_number(environ, "LOCAL_RANK"),
        local_world_size=local_world_size,
        node_rank=_number(environ, "GROUP_RANK"),
        num_nodes=_number(environ, "GROUP_WORLD_SIZE", max(1, world_size // local_world_size)),
        master_addr=environ.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT"),
        job_id=environ.get("TORCHELASTIC_RUN_ID", ""),
        restart=_number(environ, "TORCHELASTIC_RESTART_COUNT"),
    )


def _submitit_local(environ: Mapping[str, str]) -> LaunchContext:
    world_size = _number(environ, "SUBMITIT_LOCAL_NTASKS", 1)
    job_id = environ.get("SUBMITIT_LOCAL_JOB_ID", "")
    return LaunchContext(
        kind="submitit_local",
        rank=_number(environ, "SUBMITIT_LOCAL_GLOBALID"),
        world_size=world_size,
        local_rank=_number(environ, "SUBMITIT_LOCAL_LOCALID"),
        local_world_size=world_size,
        master_port=_port("submitit_local", job_id),
        job_id=job_id,
    )


def _is_srun_task(environ: Mapping[str, str]) -> bool:
    """Is this process a task of an srun step?

    A batch script has SLURM_PROCID too, but no step id; an interactive ``srun --pty`` shell has
    both, and SLURM_PTY_PORT.
    """
    has_step = "SLURM_STEP_ID" in environ or "SLURM_STEPID" in environ
    is_task = environ.keys() >= {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS"}
    return has_step and is_task and "SLURM_PTY_PORT" not in environ


def _srun(environ: Mapping[str, str]) -> LaunchContext:
    world_size = _number(environ, "SLURM_STEP_NUM_TASKS", 1)
    num_nodes = _number(environ, "SLURM_STEP_NUM_NODES", 1)
    job_id, restart = environ["SLURM_JOB_ID"], _number(environ, "SLURM_RESTART_COUNT")
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    hosts = expand_nodelist(environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or "127.0.0.1")
    return LaunchContext(
        kind="submitit_slurm" if environ.get("SUBMITIT_EXECUTOR") == "slurm" else "srun",
        rank=_number(environ, "SLURM_PROCID"),
        world_size=world_size,
        local_rank=_number(environ, "SLURM_LOCALID"),
        local_world_size=world_size // num_nodes,
        node_rank=_number(environ, "SLURM_NODEID"),
        num_nodes=num_nodes,
        master_addr=environ.get("MASTER_ADDR") or hosts[0],
        master_port=_number(environ, "MASTER_PORT") or _port("slurm", job_id, step, restart),
        job_id=job_id,
        restart=restart,
    )
