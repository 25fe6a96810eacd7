"""Small rank functions with real process groups, for the tests of the launcher: each does one thing."""

import datetime
import json
import logging
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from automodel.config.errors import ConfigError
from automodel.launch import process_group

log = logging.getLogger("automodel.launch_ranks")


def no_model_check(config, world_size):
    """Accepts every model."""


def refuse_model(config, world_size):
    raise ConfigError("model.config.hidden_size", 7, "this model has an odd size", "an even one")


def break_model_check(config, world_size):
    raise ZeroDivisionError("the check itself is broken")


def _join(config, context, device_type):
    timeout = datetime.timedelta(minutes=config.launch.timeout_minutes)
    process_group.initialize(context, device_type, timeout)


def _note(folder, rank, **values):
    path = Path(folder) / f"rank_{rank}.json"
    path.with_suffix(".tmp").write_text(json.dumps(values))
    path.with_suffix(".tmp").rename(path)


def _all_reduce(value=1.0):
    tensor = torch.tensor([value])
    if dist.is_initialized():
        dist.all_reduce(tensor)
    return tensor.item()


def add_up(config, run_dir, context, device_type, stop_requested):
    """Sum rank + 1 over the ranks; note where this rank is and what it sees."""
    _join(config, context, device_type)
    total = _all_reduce(context.rank + 1.0)
    log.info("the sum is %s", total)
    logging.getLogger("some.library").warning("rank %d has a warning", context.rank)
    print(f"printed by rank {context.rank}", flush=True)
    _note(
        run_dir,
        context.rank,
        total=total,
        context=vars(context),
        environment=dict(os.environ),
        run_dir=str(run_dir),
        threads=torch.get_num_threads(),
        started=time.time(),
        seed=config.seed,
    )
    process_group.shutdown()
    return total


def sockets(config, run_dir, context, device_type, stop_requested):
    """Note the local address of every listening socket of this process, while all ranks are connected."""
    _join(config, context, device_type)
    _all_reduce()
    inodes = set()
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    listening = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                packed = bytes.fromhex(address)
                words = b"".join(packed[i : i + 4][::-1] for i in range(0, len(packed), 4))
                family = socket.AF_INET if len(words) == 4 else socket.AF_INET6
                listening.append([socket.inet_ntop(family, words), int(port, 16)])
    _note(run_dir, context.rank, listening=listening, master_port=context.master_port)
    process_group.shutdown()


def raise_on_one(config, run_dir, context, device_type, stop_requested):
    """Rank 1 raises; the others wait for it in a collective."""
    _join(config, context, device_type)
    _note(run_dir, context.rank, pid=os.getpid())
    _all_reduce()
    if context.rank == context.world_size - 1:
        raise ValueError("bad luck in the last rank")
    wait_for_peers()


def wait_for_peers():
    _all_reduce()


def exit_on_one(config, run_dir, context, device_type, stop_requested):
    _join(config, context, device_type)
    _all_reduce()
    if context.rank == 1:
        print("last words of rank 1", flush=True)
        sys.exit(0)
    wait_for_peers()


def work_until_killed(config, run_dir, context, device_type, stop_requested):
    """Steps for ever, all ranks in step; stops at the same step on all when asked."""
    _join(config, context, device_type)
    _all_reduce()
    _note(run_dir, context.rank, pid=os.getpid(), parent=os.getppid())
    steps = 0
    while True:
        steps += 1
        stop = torch.tensor([float(stop_requested())])
        if dist.is_initialized():
            dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop.item():
            break
        time.sleep(0.01)
    _note(run_dir, context.rank, pid=os.getpid(), stopped_at=steps)
    process_group.shutdown()


def ignore_stop(config, run_dir, context, device_type, stop_requested):
    """Never stops by itself."""
    _note(run_dir, context.rank, pid=os.getpid())
    while True:
        time.sleep(0.05)


def hang_apart(config, run_dir, context, device_type, stop_requested):
    """The ranks wait in different groups until time runs out: here no rank is at fault alone."""
    _join(config, context, device_type)
    _all_reduce()
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    if context.rank == 0:
        wait_in_first(groups[0])
    else:
        wait_in_second(groups[1])


def wait_in_first(group):
    dist.all_reduce(torch.ones(1), group=group)


def wait_in_second(group):
    dist.all_reduce(torch.ones(1), group=group)


def refuse_late(config, run_dir, context, device_type, stop_requested):
    _join(config, context, device_type)
    _all_reduce()
    if context.rank == 1:
        raise ConfigError("data.files", "x.jsonl", "line 3 has no field text", "lines with the field")
    wait_for_peers()


def fail_if_seed_is_one(config, run_dir, context, device_type, stop_requested):
    if config.seed == 1:
        raise ValueError("seed one is unlucky")
    return float(config.seed)


def kill_itself(config, run_dir, context, device_type, stop_requested):
    _join(config, context, device_type)
    _all_reduce()
    if context.rank == 1:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_peers()
