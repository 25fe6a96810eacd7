"""Tensor parallelism: from a plan, the model's own or the user's, to cut parameters and exchanging forwards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import Placement, Shard
from transformers.pytorch_utils import Conv1D

from automodel.config.errors import ConfigError, nearest
from automodel.distributed.tensor_parallel_collectives import TensorParallelGroup
from automodel.distributed.tensor_parallel_rare_styles import PARAMETER_PLACEMENTS, RARE_STYLES, LatentKeyValue
from automodel.distributed.tensor_parallel_styles import STYLES, Colwise, ReplicatedKeyValue, TensorParallelStyle

__all__ = ["TensorParallelPlan", "apply_tensor_parallel", "resolve_plan"]

LATENT_STYLE = "mla_kv_a_proj"
STYLE_NAMES = sorted({*STYLES, *RARE_STYLES, *PARAMETER_PLACEMENTS, LATENT_STYLE})
# What a plan may cut in an attention whose key-value heads are replicated: everything here goes by query heads.
_KEY_VALUE_PROJECTIONS = ("k_proj", "v_proj")
_HEAD_WISE = ("q_proj", *_KEY_VALUE_PROJECTIONS, "o_proj", "q_norm", "k_norm", "sinks")


@dataclass(frozen=True)
class TensorParallelPlan:
    """A plan with its patterns replaced by names.

    Attributes:
        modules: module name -> style name.
        parameters: parameter name -> style name, for parameters that have no module of their own.
        unmatched: patterns of the model's own plan that name nothing in this model: shared plans list the parts
            of every variant of an architecture.
    """

    modules: dict[str, str]
    parameters: dict[str, str]
    unmatched: tuple[str, ...] = ()


def resolve_plan(model: nn.Module, user_plan: Mapping[str, str] | None, tp_size: int) -> TensorParallelPlan:
    """The plan for ``model``, checked against it; the whole model, before a pipeline split.

    Args:
        model: from Hugging Face; its own plan is the merged ``model.tp_plan``.
        user_plan: pattern -> style, instead of the model's own. Patterns are full names of modules or
            parameters, in which ``*`` stands for one component.
        tp_size: ranks that share the parameters.

    Raises:
        ConfigError: no plan, an unknown style, a pattern that matches nothing, a style that does not fit its
            module, or key-value heads that this size cannot serve.
    """
    patterns: dict[str, str] = dict(user_plan if user_plan is not None else getattr(model, "tp_plan", None) or {})
    if not patterns:
        raise ConfigError(
            "distributed.tp_size",
            tp_size,
            f"{type(model).__name__} comes without a tensor-parallel plan",
            "1, or a plan of your own in distributed.tp_plan (pattern: style), as in conf/distributed/gpt2_tp2.yaml",
        )
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    found: dict[str, dict[str, str]] = {"modules": {}, "parameters": {}}
    unmatched = []
    for pattern, style in patterns.items():
        key = f"distributed.tp_plan.{pattern}"
        if style not in STYLE_NAMES:
            raise ConfigError(key, style, "there is no such style", STYLE_NAMES, nearest(str(style), STYLE_NAMES))
        matches = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+")).fullmatch
        hit_modules = [name for name in modules if name and matches(name)]
        hit_parameters = [name for name in parameters if matches(name)]
        if not hit_modules and not hit_parameters:
            unmatched.append(pattern)
        for name in hit_modules:
            _check_fit(key, style, name, modules[name])
        for name in hit_parameters:
            _check_owner(key, style, modules, name, patterns)
        found["modules"].update(dict.fromkeys(hit_modules, style))
        found["parameters"].update(dict.fromkeys(hit_parameters, style))
    _check_unmatched(model, user_plan, unmatched, found)
    plan = TensorParallelPlan(found["modules"], found["parameters"], tuple(unmatched))
    for name, attention in modules.items():
        _replicated_key_value(model, name, attention, plan, tp_size, 0)
    return plan


def _check_unmatched(
    model: nn.Module, user_plan: Mapping[str, str] | None, unmatched: list[str], found: dict[str, dict[str, str]]
) -> None:
    if user_plan is not None and unmatched:
        names = [name for name, _ in model.named_modules() if name]
        raise ConfigError(
            f"distributed.tp_plan.{unmatched[0]}",
            user_plan[unmatched[0]],
            f"no module or parameter of {type(model).__name__} has a name like this",
            "full names such as " + ", ".join(_with_wildcards(names)[:8]),
            nearest(unmatched[0], _with_wildcards(names)),
        )
    # A plan of the vocabulary alone is one that some models really have.
    if unmatched and not any(re.search(r"\.\d+\.", name) for kind in found.values() for name in kind):
        raise ConfigError(
            "distributed.tp_plan",
            None,
            f"the plan of {type(model).__name__} names no part of its blocks: {', '.join(unmatched)}",
            "a plan of your own in distributed.tp_plan",
        )


def _with_wildcards(names: list[str]) -> list[str]:
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", name) for name in names))


def _check_fit(key: str, style: str, name: str, module: nn.Module) -> None:
    """Embeddings take embedding styles, and linear styles need a matrix."""
    weight: Any = getattr(module, "weight", None)
    is_embedding = isinstance(module, nn.Embedding)
    wrong = style.startswith("embedding_") != is_embedding if style in STYLES and weight is not None else False
    if style.startswith(("colwise", "rowwise")) and (weight is None or weight.ndim != 2):
        wrong = True
    if style in PARAMETER_PLACEMENTS and style not in STYLES:
        wrong = True
    if wrong and style != "replicated_with_grad_allreduce":
        raise ConfigError(
            key,
            style,
            f"this style does not fit {name}, a {type(module).__name__}",
            "embedding_rowwise or embedding_colwise for embeddings, colwise... or rowwise... for linear modules",
        )


def _check_owner(
    key: str, style: str, modules: Mapping[str, nn.Module], name: str, patterns: Mapping[str, str]
) -> None:
    """A parameter without a module of its own is cut only under an owner that reads its local part."""
    owner = name.rpartition(".")[0]
    generic = {owner, *_with_wildcards([owner])}
    local = any(patterns.get(pattern) in ("local_params", "moe_tp_experts") for pattern in generic)
    if not local or style not in PARAMETER_PLACEMENTS:
        raise ConfigError(
            key,
            style,
            f"{name} is a parameter of a {type(modules[owner]).__name__}, not a module",
            f"{', '.join(PARAMETER_PLACEMENTS)}, with local_params or moe_tp_experts for {_with_wildcards([owner])[0]}",
        )


def _replicated_key_value(
    model: Any, name: str, attention: Any, plan: TensorParallelPlan, tp_size: int, rank: int
) -> tuple[ReplicatedKeyValue, int] | None:
    """For an attention whose key-value heads do not divide over the ranks: its projections' style.

    Returns:
        the style and the number of this rank's query heads to each of its key-value heads; None where key-value heads
        divide or are not cut.
    """
    projections = [f"{name}.{child}" for child in _KEY_VALUE_PROJECTIONS]
    if not any(plan.modules.get(projection) == "colwise" for projection in projections):
        return None
    groups = getattr(attention, "num_key_value_groups", None)
    num_heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
    if groups is None or not isinstance(num_heads, int) or (num_heads // groups) % tp_size == 0:
        return None
    others = [
        entry
        for entry in [*plan.modules, *plan.parameters]
        if entry.startswith(f"{name}.") and entry.removeprefix(f"{name}.") not in _HEAD_WISE
    ]
    if others or num_heads % tp_size:
        raise ConfigError(
            "distributed.tp_size",
            tp_size,
            f"{type(model).__name__} has {num_heads // groups} key-value heads, which tp_size does not divide"
            + (f", and its plan cuts {others[0]} too" if others else ""),
            [size for size in range(1, num_heads + 1) if (num_heads // groups) % size == 0],
        )
    local = num_heads // tp_size
    of_queries = [query // groups for query in range(rank * local, (rank + 1) * local)]
    needed = list(dict.fromkeys(of_queries))
    share = local // len(needed)
    even = [head for head in needed for _ in range(share)] == of_queries
    return ReplicatedKeyValue(num_heads // groups, needed if even else of_queries), share if even else 1


def apply_tensor_parallel(
    model: nn.Module, group: TensorParallelGroup, plan: TensorParallelPlan
) -> dict[str, TensorParallelStyle]:
    """Cut the parameters of ``model`` over the group and install the exchanges, in place.

    Parameters that are tied stay one. Parameters outside the plan stay plain tensors, whole on every rank, with the
    same whole gradient on each.

    Args:
        model: on meta. Parts that a pipeline split took away are passed over.
        group: the tp axis.
        plan: from :func:`resolve_plan` of the whole model.

    Returns:
        module name -> its style.
    """
    modules = dict(model.named_modules())
    styles = {
        name: _style(model, style)
        for name, style in plan.modules.items()
        if name in modules and (style in RARE_STYLES or any(True for _ in modules[name].parameters()))
    }
    for name, attention in modules.items():
        replicated = _replicated_key_value(model, name, attention, plan, group.size, group.rank)
        if replicated is not None and any(True for _ in attention.parameters()):
            attention.num_key_value_groups = replicated[1]
            styles.update(dict.fromkeys([f"{name}.{child}" for child in _KEY_VALUE_PROJECTIONS], replicated[0]))
    cutter = _Cutter(group)
    for name, style in styles.items():
        for key in modules[name]._parameters:
            if f"{name}.{key}" not in plan.parameters:
                cutter.cut(modules[name], key, style.placement(modules[name], key))
    for name, style_name in plan.parameters.items():
        owner, _, key = name.rpartition(".")
        if owner in modules and modules[owner]._parameters.get(key) is not None:
            parameter = modules[owner]._parameters[key]
            assert parameter is not None
            cutter.cut(modules[owner], key, PARAMETER_PLACEMENTS[style_name](parameter))
    for name, module in modules.items():
        if cutter.retie(module) and name not in styles:
            styles[name] = Colwise(gather_output=True)
    for name, style in styles.items():
        style.install(modules[name], group)
    return styles


def _style(model: Any, name: str) -> TensorParallelStyle:
    if name == LATENT_STYLE:
        return LatentKeyValue(model.config.get_text_config().qk_rope_head_dim)
    return STYLES[name]() if name in STYLES else RARE_STYLES[name]()


class _Cutter:
    """Replaces parameters by DTensors, tied ones by the same."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self.group = group
        self.cut_parameters: dict[int, tuple[nn.Parameter, nn.Parameter, Placement]] = {}

    def cut(self, module: nn.Module, key: str, placement: Placement | None) -> None:
        parameter = module._parameters[key]
        if parameter is None or placement is None:
            return
        if id(parameter) in self.cut_parameters:
            _, parameter, known = self.cut_parameters[id(parameter)]
            if known != placement:
                raise ValueError(f"a tied parameter of {type(module).__name__} is to be cut as {known} and {placement}")
            module._parameters[key] = parameter
            return
        tensor = distribute_tensor(parameter.detach(), self.group.mesh, [placement], src_data_rank=None)
        module._parameters[key] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        # The old parameter is kept, so that its id stays its own.
        self.cut_parameters[id(parameter)] = (parameter, module._parameters[key], placement)  # type: ignore[assignment]

    def retie(self, module: nn.Module) -> bool:
        """Give a module without a style, tied to a cut parameter, the cut one; True when its weight was exchanged.

        Raises:
            ValueError: the module is not linear, or the parameter is not cut along its outputs.
        """
        exchanged = False
        for key, parameter in module._parameters.items():
            if parameter is None or id(parameter) not in self.cut_parameters:
                continue
            _, module._parameters[key], placement = self.cut_parameters[id(parameter)]
            if not isinstance(module, nn.Linear | Conv1D) or key != "weight" or placement != Shard(0):
                raise ValueError(f"{key} of a {type(module).__name__} is tied to a parameter cut as {placement}")
            exchanged = True
        return exchanged
