"""What each pipeline schedule asks of stages and micro-batches; the rules are those of torch's schedule classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from automodel.config.distributed import DistributedSection, PipelineConfig
from automodel.config.errors import ConfigError, nearest
from automodel.config.pipeline_csv import read_csv_schedule


@dataclass(frozen=True)
class Schedule:
    """One pipeline schedule.

    Attributes:
        name: as the file in ``conf/pipeline``.
        stages: ``one`` stage a rank, ``many`` (two by default), or ``two`` in a V.
        splits_backward: the gradients of inputs and of weights are computed apart, to fill the bubble.
    """

    name: str
    stages: Literal["one", "many", "two"]
    splits_backward: bool = False

    def needs_microbatches(self, count: int, pp_size: int) -> str | None:
        """The rule that ``count`` micro-batches break, or None."""
        if self.name == "1f1b" and count < pp_size:
            return f"1f1b needs at least pp_size={pp_size} micro-batches"
        if self.name == "dualpipe_v" and count < 2 * pp_size:
            return f"dualpipe_v needs at least 2 * pp_size = {2 * pp_size} micro-batches"
        rounds = max(1, count // pp_size)
        if self.stages == "many" and self.name != "looped_bfs" and count % rounds:
            return f"{self.name} runs {count} micro-batches in {rounds} equal rounds of at least pp_size={pp_size}"
        return None


SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("1f1b", "one"),
        Schedule("gpipe", "one"),
        Schedule("interleaved_1f1b", "many"),
        Schedule("looped_bfs", "many"),
        Schedule("v_schedule", "two", splits_backward=True),
        Schedule("dualpipe_v", "two", splits_backward=True),
        Schedule("zero_bubble", "many", splits_backward=True),
    )
}
_WHOLE_BACKWARD = f"another schedule: {', '.join(s.name for s in SCHEDULES.values() if not s.splits_backward)}"
# Spellings with underscores, hyphens and capitals removed; torch's class names are among them.
_ALIASES = {
    **{name.replace("_", ""): name for name in SCHEDULES},
    "dfs": "interleaved_1f1b",
    "zbv": "v_schedule",
    "zbvzerobubble": "v_schedule",
    "interleavedzerobubble": "zero_bubble",
}


def find_schedule(name: str) -> Schedule:
    """The schedule of this name, in any of its spellings.

    Raises:
        ConfigError: there is none.
    """
    squashed = name.lower().replace("_", "").replace("-", "").replace(" ", "")
    if squashed not in _ALIASES:
        names = [*SCHEDULES, "dfs"]
        raise ConfigError(
            "distributed.pipeline.pp_schedule", name, "there is no such schedule", names, nearest(name.lower(), names)
        )
    return SCHEDULES[_ALIASES[squashed]]


def check_pipeline(section: DistributedSection, local_batch_size: int, samples_per_rank: int) -> None:
    """Schedule, micro-batches and checkpointing of a pipeline; nothing when ``pp_size`` is 1.

    Args:
        section: the parsed ``distributed`` section.
        local_batch_size: samples of one rank's forward.
        samples_per_rank: samples of one rank in an optimizer step, a multiple of ``local_batch_size``.

    Raises:
        ConfigError: names the rule that is broken.
    """
    if section.pp_size == 1:
        return
    pipeline = section.pipeline
    size = pipeline.pp_microbatch_size
    if size < 1:
        raise ConfigError(
            "distributed.pipeline.pp_microbatch_size", size, "a micro-batch has at least one sample", "1, 2, ..."
        )
    schedule = find_schedule(pipeline.pp_schedule)
    csv = None if pipeline.pp_schedule_csv is None else read_csv_schedule(pipeline.pp_schedule_csv, section.pp_size)
    _check_checkpointing(section, "the schedule" if csv else schedule.name, (csv or schedule).splits_backward)
    if (csv or schedule).splits_backward and getattr(section.strategy_config, "enable_compile", False):
        raise ConfigError(
            "distributed.enable_compile",
            True,
            "the schedule runs backward in two halves, and the backward of a compiled block is one piece",
            f"false, or {_WHOLE_BACKWARD}",
        )
    if pipeline.scale_grads_in_schedule and samples_per_rank != local_batch_size:
        raise ConfigError(
            "distributed.pipeline.scale_grads_in_schedule",
            True,
            "a schedule rescales all gradients so far, and this step runs it "
            f"{samples_per_rank // local_batch_size} times",
            f"false, or training.local_batch_size={samples_per_rank}",
        )
    if getattr(section.strategy_config, "gather_once_per_step", False):
        raise ConfigError(
            "distributed.gather_once_per_step",
            True,
            "with pp_size > 1 parameters are gathered once for each local batch",
            f"false, or training.local_batch_size={samples_per_rank} to gather once in a step",
        )
    if local_batch_size % size:
        legal = _legal_local_batches(schedule, pipeline, section.pp_size, samples_per_rank)
        raise ConfigError(
            "training.local_batch_size",
            local_batch_size,
            f"a local batch must be a multiple of distributed.pipeline.pp_microbatch_size={size}",
            legal,
        )
    if csv is not None:
        if local_batch_size // size != csv.num_microbatches:
            raise ConfigError(
                "training.local_batch_size",
                local_batch_size,
                f"the schedule in distributed.pipeline.pp_schedule_csv is for {csv.num_microbatches} micro-batches of "
                f"{size}",
                str(csv.num_microbatches * size),
            )
        return
    rule = schedule.needs_microbatches(local_batch_size // size, section.pp_size)
    if rule is not None:
        legal = _legal_local_batches(schedule, pipeline, section.pp_size, samples_per_rank)
        raise ConfigError(
            "training.local_batch_size",
            local_batch_size,
            f"{rule}; local_batch_size / pp_microbatch_size gives {local_batch_size // size}",
            legal,
        )


def _check_checkpointing(section: DistributedSection, schedule: str, splits_backward: bool) -> None:
    mode = section.activation_checkpointing
    if not splits_backward or mode in (False, "full"):
        return
    if mode == "selective":
        rule = f"{schedule} runs backward in two halves, which selective checkpointing cannot serve"
        raise ConfigError("distributed.activation_checkpointing", mode, rule, f"false, or {_WHOLE_BACKWARD}")
    raise ConfigError(
        "distributed.activation_checkpointing",
        mode,
        f"{schedule} runs backward in two halves, and recomputes each block up to ten times",
        f"full, if memory is worth that; false; or {_WHOLE_BACKWARD}",
    )


def _legal_local_batches(schedule: Schedule, pipeline: PipelineConfig, pp_size: int, samples_per_rank: int) -> str:
    size = pipeline.pp_microbatch_size
    fitting = [
        batch
        for batch in range(size, samples_per_rank + 1, size)
        if samples_per_rank % batch == 0 and schedule.needs_microbatches(batch // size, pp_size) is None
    ]
    if fitting:
        return ", ".join(str(batch) for batch in fitting)
    return "none with this global_batch_size: raise it, or set a smaller distributed.pipeline.pp_microbatch_size"


def check_stages(section: DistributedSection, num_layers: int | None) -> None:
    """Stages against ranks and layers; nothing when ``pp_size`` is 1.

    Args:
        section: the parsed ``distributed`` section.
        num_layers: transformer blocks of the model; None where it is not known yet.

    Raises:
        ConfigError: names the rule that is broken.
    """
    if section.pp_size == 1:
        return
    pipeline, pp_size = section.pipeline, section.pp_size
    schedule = find_schedule(pipeline.pp_schedule)
    stages = count_stages(pipeline, pp_size, num_layers)
    if stages is None:
        return
    per_rank = stages // pp_size
    wanted = {"one": 1, "two": 2}.get(schedule.stages) if pipeline.pp_schedule_csv is None else None
    if wanted is not None and per_rank != wanted:
        key = "layers_per_stage" if pipeline.module_fqns_per_model_part is None else "module_fqns_per_model_part"
        raise ConfigError(
            f"distributed.pipeline.{key}",
            getattr(pipeline, key) if key == "layers_per_stage" else f"{stages} parts",
            f"{schedule.name} has {wanted} stage{'s' * (wanted > 1)} a rank, and this makes {per_rank}",
            f"what gives {wanted * pp_size} stages, or another schedule",
        )
    if num_layers is not None and pipeline.module_fqns_per_model_part is None and stages > num_layers:
        raise ConfigError(
            "distributed.pp_size",
            pp_size,
            f"{schedule.name} makes {stages} stages ({per_rank} a rank), more than the model's {num_layers} layers",
            f"a pp_size of at most {max(1, num_layers // per_rank)}, or fewer stages a rank (1f1b and gpipe have one)",
        )


def count_stages(pipeline: PipelineConfig, pp_size: int, num_layers: int | None) -> int | None:
    """Stages over all ranks, a multiple of ``pp_size``; None where that depends on unknown layers.

    Raises:
        ConfigError: the settings give no such number.
    """
    schedule = find_schedule(pipeline.pp_schedule)
    parts, per_stage = pipeline.module_fqns_per_model_part, pipeline.layers_per_stage
    if pipeline.pp_schedule_csv is not None:
        return _count_csv_stages(pipeline, pp_size, num_layers)
    if parts is not None:
        if per_stage is not None:
            raise ConfigError(
                "distributed.pipeline.layers_per_stage",
                per_stage,
                "module_fqns_per_model_part already says what each stage holds",
                "none, or no module_fqns_per_model_part",
            )
        if len(parts) == 0 or len(parts) % pp_size:
            raise ConfigError(
                "distributed.pipeline.module_fqns_per_model_part",
                f"{len(parts)} parts",
                f"the number of parts must be a multiple of pp_size={pp_size}",
                f"{pp_size}, {2 * pp_size}, ... parts",
            )
        return len(parts)
    if per_stage is None:
        return pp_size * (1 if schedule.stages == "one" else 2)
    if per_stage < 1:
        raise ConfigError(
            "distributed.pipeline.layers_per_stage", per_stage, "a stage has at least one layer", "1, 2, ..., none"
        )
    if num_layers is None:
        return None
    stages = -(-num_layers // per_stage)
    if stages % pp_size == 0:
        return stages
    rounding = pipeline.round_virtual_stages_to_pp_multiple
    if rounding == "up":
        return stages + pp_size - stages % pp_size
    if rounding == "down" and stages > pp_size:
        return stages - stages % pp_size
    fitting = [n for n in range(1, num_layers + 1) if -(-num_layers // n) % pp_size == 0]
    raise ConfigError(
        "distributed.pipeline.layers_per_stage",
        per_stage,
        f"{num_layers} layers make {stages} stages, which is no multiple of pp_size={pp_size}",
        f"{', '.join(map(str, fitting)) or 'none'}; or round_virtual_stages_to_pp_multiple=up",
    )


def _count_csv_stages(pipeline: PipelineConfig, pp_size: int, num_layers: int | None) -> int:
    assert pipeline.pp_schedule_csv is not None
    stages = len(read_csv_schedule(pipeline.pp_schedule_csv, pp_size).stage_ranks)
    parts, per_stage = pipeline.module_fqns_per_model_part, pipeline.layers_per_stage
    if parts is not None and len(parts) != stages:
        raise ConfigError(
            "distributed.pipeline.module_fqns_per_model_part",
            f"{len(parts)} parts",
            f"the schedule in distributed.pipeline.pp_schedule_csv has {stages} stages",
            f"{stages} parts",
        )
    if per_stage is not None and num_layers is not None and -(-num_layers // per_stage) != stages:
        raise ConfigError(
            "distributed.pipeline.layers_per_stage",
            per_stage,
            f"the schedule in distributed.pipeline.pp_schedule_csv has {stages} stages for {num_layers} layers",
            "none",
        )
    return stages
