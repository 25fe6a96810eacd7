"""What Hydra calls for each job of a plain ``python train.py``."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from automodel.config.errors import ConfigError
from automodel.launch.compose import to_container
from automodel.launch.context import LaunchContext, detect
from automodel.launch.errors import RunFailed
from automodel.launch.local import run_local
from automodel.launch.logs import append_text
from automodel.launch.preflight import Plan, preflight
from automodel.launch.program import Program


class JobFailed(BaseException):
    """Carries a job's error through Hydra, which would print lines of its own about an Exception."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        super().__init__(error)


@dataclass
class LocalTask:
    """Runs one composed config in processes of its own and returns its objective.

    A job that fails in a sweep tells its error at once, and the sweep goes on.

    Attributes:
        plan: the plan of a config that was checked before Hydra made its folder.
        failed: job number -> its error, over all jobs that ran in this process.
    """

    program: Program
    plan: Plan | None = None
    num_jobs: int = 0
    failed: dict[int, Exception] = field(default_factory=dict)

    def __call__(self, composed: Any) -> float | None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra = HydraConfig.get()
        run_dir = Path(hydra.runtime.output_dir)
        self.num_jobs += 1
        try:
            refuse_foreign_ranks(detect(os.environ))
            plan = self._plan_for(to_container(composed, hydra.overrides.task))
            return run_local(plan.config, run_dir, plan.world_size, plan.device, self.program)
        except (ConfigError, RunFailed) as error:
            append_text(run_dir, error.details if isinstance(error, RunFailed) else str(error))
            if hydra.mode != RunMode.MULTIRUN:
                raise JobFailed(error) from error
            self.failed[hydra.job.num] = error
            print(f"job {hydra.job.num} ({run_dir}): {error}\n", file=sys.stderr)
            raise

    def _plan_for(self, container: dict[str, Any]) -> Plan:
        if self.plan is not None and self.plan.container == container:
            return self.plan
        return preflight(container, LaunchContext(), self.program)


def refuse_foreign_ranks(context: LaunchContext) -> None:
    """Refuse a job that Hydra's launcher started as one of several ranks.

    Each of them would start a world of its own, all in one run folder.

    Raises:
        ConfigError: the process is a rank already.
    """
    if context.kind != "single":
        raise ConfigError(
            "hydra/launcher",
            context.kind,
            "jobs whose ranks another launcher starts are not supported by this version",
            "leave hydra/launcher out, or start the ranks with torchrun or srun",
        )
