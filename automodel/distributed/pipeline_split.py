"""Which modules each pipeline stage owns, and how a whole model on meta becomes one stage of it.

No forward is patched: what a stage does not own is replaced, in place, by a module without parameters that hands its
input on. So names and layer indices never move, and every stage runs the model's own forward.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from automodel.config.distributed import PipelineConfig
from automodel.config.errors import ConfigError, nearest
from automodel.distributed.blocks import NotOwned

PLAN_KEY = "distributed.pipeline.pp_plan"
PARTS_KEY = "distributed.pipeline.module_fqns_per_model_part"


@dataclass(frozen=True)
class ModelPlan:
    """A model's modules along the pipeline, by full name.

    Attributes:
        before: what runs before the layers, such as the embedding.
        layers: the layers, in order.
        after: what runs after them, such as the final norm and the head.
    """

    before: tuple[str, ...]
    layers: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def modules(self) -> tuple[str, ...]:
        return (*self.before, *self.layers, *self.after)


@dataclass(frozen=True)
class Tie:
    """One parameter in two stages: ``name`` in stage ``home``, and an equal copy ``copy_name`` in ``copy_stage``."""

    name: str
    home: int
    copy_name: str
    copy_stage: int


@dataclass(frozen=True)
class SplitPlan:
    """What each stage owns.

    Attributes:
        stages: full names of the modules of each stage.
        num_layers: of each stage.
        num_parameters: elements of each stage; the copy of a tied parameter counts at its home only.
        ties: parameters that two stages hold.
    """

    stages: tuple[tuple[str, ...], ...]
    num_layers: tuple[int, ...]
    num_parameters: tuple[int, ...]
    ties: tuple[Tie, ...]


def read_plan(model: PreTrainedModel, pp_plan: Sequence[str] | None, pp_size: int) -> ModelPlan:
    """The plan given by the user, else the model's own ``pp_plan``.

    Args:
        model: whole, on meta.
        pp_plan: full names of modules in the order in which they run.

    Raises:
        ConfigError: there is no plan, or it names no module, or not the model's layers.
    """
    own: dict[str, Any] = dict(getattr(model, "pp_plan", None) or {})
    stacks = {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == model.config.get_text_config().num_hidden_layers
    }
    if pp_plan is None and not (stacks & own.keys()):
        raise ConfigError(
            "distributed.pp_size",
            pp_size,
            f"{type(model).__name__} has no pipeline plan",
            "1, or the names of its modules in the order they run, such as "
            f"distributed.pipeline.pp_plan=[{','.join(_guess_plan(model, stacks))}]",
        )
    if pp_plan is None:
        # The model's own plan says what each module takes; its order is not that of the forward.
        inputs = {name: tuple(signature[0]) for name, signature in own.items()}
        before = [name for name, taken in inputs.items() if taken[0] in ("input_ids", "inputs_embeds")]
        stack = next(name for name in own if name in stacks)
        after = [name for name in _in_model_order(model, own) if name not in (*before, stack)]
    else:
        known = dict(model.named_modules())
        for name in pp_plan:
            if name not in known:
                hint = nearest(name, list(known))
                raise ConfigError(
                    PLAN_KEY,
                    name,
                    f"{type(model).__name__} has no module of this name",
                    f"modules such as {', '.join(_guess_plan(model, stacks))}",
                    hint,
                )
        places = [index for index, name in enumerate(pp_plan) if name in stacks]
        if len(places) != 1:
            raise ConfigError(
                PLAN_KEY, list(pp_plan), "the plan must name the model's list of layers once", sorted(stacks)
            )
        before, stack, after = list(pp_plan[: places[0]]), pp_plan[places[0]], list(pp_plan[places[0] + 1 :])
    layers = tuple(f"{stack}.{index}" for index, _ in model.get_submodule(stack).named_children())
    return ModelPlan(tuple(before), layers, tuple(after))


def _in_model_order(model: nn.Module, names: dict[str, Any]) -> list[str]:
    return [name for name, _ in model.named_modules() if name in names]


def _guess_plan(model: nn.Module, stacks: set[str]) -> list[str]:
    """Modules with parameters beside the layers, as an example for the user to correct."""
    names = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{stack}.") for stack in stacks)
        if name in stacks or (not inside and any(p is not None for p in module._parameters.values())):
            names.append(name)
    return names


def split_plan(model: PreTrainedModel, config: PipelineConfig, num_stages: int, pp_size: int) -> SplitPlan:
    """Give every module of the model's plan to one stage.

    Args:
        model: whole, on meta.
        config: explicit parts or layers per stage, if any; else stages are balanced by their parameters.
        num_stages: over all ranks.

    Raises:
        ConfigError: no plan, more stages than layers, or parts that are not the model's modules in their order.
        RuntimeError: parameters of the stages do not add up to those of the model.
    """
    plan = read_plan(model, config.pp_plan, pp_size)
    if config.module_fqns_per_model_part is not None:
        stages = _explicit_parts(model, plan, config.module_fqns_per_model_part)
    else:
        per_stage = _layer_counts(model, plan, config, num_stages, pp_size)
        ends = list(itertools.accumulate(per_stage))
        owned = [plan.layers[end - count : end] for count, end in zip(per_stage, ends, strict=True)]
        owned[0] = (*plan.before, *owned[0])
        owned[-1] = (*owned[-1], *plan.after)
        stages = tuple(owned)
    return _describe(model, plan, stages)


def _layer_counts(
    model: nn.Module, plan: ModelPlan, config: PipelineConfig, num_stages: int, pp_size: int
) -> list[int]:
    count = len(plan.layers)
    if num_stages > count:
        raise ConfigError(
            "distributed.pp_size", pp_size, f"it makes {num_stages} stages for {count} layers", "fewer stages"
        )
    per_stage = config.layers_per_stage
    if per_stage is not None and -(-count // per_stage) == num_stages:
        return [min(per_stage, count - start) for start in range(0, count, per_stage)]
    sizes = {name: _num_parameters(model, [name]) for name in plan.modules}
    return balanced_counts(
        [sizes[name] for name in plan.layers],
        sum(sizes[name] for name in plan.before),
        sum(sizes[name] for name in plan.after),
        num_stages,
    )


def balanced_counts(layers: Sequence[int], before: int, after: int, num_stages: int) -> list[int]:
    """Layers of each stage, at least one, so that the sum of the stages' squared costs is smallest; then that of
    their squared numbers of layers.

    Args:
        layers: cost of each layer.
        before: cost of what the first stage has besides its layers.
        after: the same of the last stage.
    """
    total = [0, *itertools.accumulate(layers)]
    unreachable = (float("inf"), 0)
    # best[s][n]: smallest sums of squares of s stages that hold the first n layers.
    best = [[unreachable] * (len(layers) + 1) for _ in range(num_stages + 1)]
    begins = [[0] * (len(layers) + 1) for _ in range(num_stages + 1)]
    best[0][0] = (0.0, 0)
    for stage in range(1, num_stages + 1):
        extra = (before if stage == 1 else 0) + (after if stage == num_stages else 0)
        for end in range(stage, len(layers) - (num_stages - stage) + 1):
            for begin in range(stage - 1, end):
                squares, counts = best[stage - 1][begin]
                cost = squares + float(total[end] - total[begin] + extra) ** 2, counts + (end - begin) ** 2
                if cost < best[stage][end]:
                    best[stage][end], begins[stage][end] = cost, begin
    result, end = [], len(layers)
    for stage in range(num_stages, 0, -1):
        result.append(end - begins[stage][end])
        end = begins[stage][end]
    return result[::-1]


def _explicit_parts(model: nn.Module, plan: ModelPlan, parts: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    """Parts given by the user, without modules that have no parameters, which every stage keeps."""
    known = dict(model.named_modules())
    stages = []
    for part in parts:
        for name in part:
            if name not in known:
                hint = nearest(name, list(plan.modules))
                raise ConfigError(
                    PARTS_KEY, name, f"{type(model).__name__} has no module of this name", list(plan.modules), hint
                )
        stages.append(
            tuple(name for name in part if name in plan.modules or any(True for _ in known[name].parameters()))
        )
    given = [name for stage in stages for name in stage]
    for name, right in itertools.zip_longest(given, plan.modules, fillvalue="nothing"):
        if name != right:
            raise ConfigError(
                PARTS_KEY,
                name,
                f"the parts together must name the model's modules once, in the order they run, and here comes {right}",
                ", ".join(plan.modules),
            )
    if any(not any(name in plan.layers for name in stage) for stage in stages):
        raise ConfigError(PARTS_KEY, [list(part) for part in parts], "each part needs a layer", "parts with layers")
    return tuple(stages)


def _num_parameters(model: nn.Module, names: Sequence[str]) -> int:
    unique = {id(p): p.numel() for name in names for p in model.get_submodule(name).parameters()}
    return sum(unique.values())


def _describe(model: PreTrainedModel, plan: ModelPlan, stages: tuple[tuple[str, ...], ...]) -> SplitPlan:
    homes: dict[int, tuple[str, int]] = {}
    ties = []
    counts = [0] * len(stages)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        stage = _stage_of(name, stages)
        if stage is None:
            raise ConfigError(
                PLAN_KEY,
                list(plan.modules),
                f"{name} of {type(model).__name__} is in no module of the plan: each stage would train its own copy",
                "a plan that names every module with parameters",
            )
        if id(parameter) not in homes:
            homes[id(parameter)] = name, stage
            counts[stage] += parameter.numel()
        elif homes[id(parameter)][1] != stage:
            ties.append(Tie(*homes[id(parameter)], name, stage))
    whole = sum(parameter.numel() for parameter in model.parameters())
    if sum(counts) != whole:
        raise RuntimeError(f"the stages have {sum(counts):,} parameters and the model {whole:,}")
    layers = tuple(sum(name in plan.layers for name in stage) for stage in stages)
    return SplitPlan(stages, layers, tuple(counts), tuple(ties))


def _stage_of(parameter: str, stages: Sequence[Sequence[str]]) -> int | None:
    for index, names in enumerate(stages):
        if any(parameter.startswith(f"{name}.") for name in names):
            return index
    return None


def take_stage(model: PreTrainedModel, split: SplitPlan, index: int) -> PreTrainedModel:
    """A copy of the model that holds the modules of one stage; parameter names do not change.

    Args:
        model: whole, on meta; it stays as it is.
    """
    part: PreTrainedModel = copy.deepcopy(model)
    owned = split.stages[index]
    for stage, names in enumerate(split.stages):
        if stage == index:
            continue
        for name in names:
            if name not in owned:
                parent, _, attribute = name.rpartition(".")
                setattr(part.get_submodule(parent), attribute, NotOwned(part.get_submodule(name)))
    return part
