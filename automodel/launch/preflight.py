"""Say no early: every check that can be made before a rank starts or a run folder exists."""

from __future__ import annotations

import contextlib
import os
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from automodel.config.errors import ConfigError
from automodel.config.schema import TrainConfig, load
from automodel.config.validate import resolve_world_size, validate
from automodel.data.checks import check_data
from automodel.launch import forkserver
from automodel.launch.context import LaunchContext
from automodel.launch.devices import DeviceType, choose_device, count_gpus
from automodel.launch.errors import RunFailed
from automodel.launch.lifetime import end_with_parent
from automodel.launch.program import Program, resolve
from automodel.training.checkpoint.folder import find_named


@dataclass(frozen=True)
class Plan:
    """A request that passed: what to run, in how many processes, on what."""

    container: dict[str, Any]
    config: TrainConfig
    world_size: int
    device: DeviceType


def preflight(container: dict[str, Any], context: LaunchContext, program: Program) -> Plan:
    """Check a composed config in two tiers: within a second, without torch; then with the model's class.

    A launcher has the second tier done by a child of the fork server, so that it never imports
    torch itself, and the imports serve the ranks too.

    Args:
        container: the composed config as plain containers.

    Raises:
        ConfigError: the request is impossible.
        RunFailed: the check itself broke.
    """
    num_gpus = count_gpus(os.environ)
    plan = check_settings(container, context, num_gpus)
    while True:
        counted = _check_in_child(plan, program) if context.kind == "single" else _check(plan, program)
        if counted == num_gpus:
            return plan
        # torch's own count is the one that holds; with it, another world may be right.
        num_gpus = counted
        plan = check_settings(container, context, num_gpus)


def check_settings(container: dict[str, Any], context: LaunchContext, num_gpus: int) -> Plan:
    """The first tier: everything that settings and files alone decide.

    Raises:
        ConfigError: the request is impossible.
    """
    config = load(container)
    joined = context.kind != "single"
    world_size = resolve_world_size(config, context.world_size if joined else None, num_gpus)
    device = choose_device(config.launch.device, num_gpus)
    if context.kind == "torchrun" and device == "cuda" and context.local_world_size > num_gpus:
        raise ConfigError(
            "torchrun --nproc-per-node",
            context.local_world_size,
            f"each process needs a GPU of its own, and this host has {num_gpus}",
            f"1 to {num_gpus}, or launch.device=cpu",
        )
    validate(config, world_size, context.local_world_size if context.num_nodes > 1 else None)
    check_data(config)
    resume = config.checkpoint.resume
    if resume is not None and resume != "auto":
        find_named(resume)
    return Plan(container, config, world_size, device)


def _check(plan: Plan, program: Program) -> int:
    """The second tier, in this process; returns torch's count of GPUs."""
    resolve(program.check_model)(plan.config, plan.world_size)
    import torch

    return torch.cuda.device_count()


def _check_in_child(plan: Plan, program: Program) -> int:
    context = forkserver.start(program.modules_for(plan.config))
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(plan, program, dict(os.environ), sender), name="preflight")
    child.start()
    sender.close()
    try:
        answer = receiver.recv()
    except EOFError:
        child.join()
        answer = f"the check of the model ended without an answer, exit code {child.exitcode}"
    finally:
        child.kill()
        child.join()
        receiver.close()
    if isinstance(answer, ConfigError):
        raise answer
    if isinstance(answer, str):
        raise RunFailed(f"the check before the run failed:\n\n{answer}")
    return answer


def _child(plan: Plan, program: Program, environment: dict[str, str], sender: Connection) -> None:
    end_with_parent()
    os.environ.clear()
    os.environ.update(environment)
    try:
        answer: int | str | ConfigError = _check(plan, program)
    except ConfigError as error:
        answer = error
    except Exception:
        answer = traceback.format_exc()
    # A launcher that was interrupted meanwhile does not wait for an answer.
    with contextlib.suppress(BrokenPipeError):
        sender.send(answer)
