"""build_optimizer: groups, ties, dtypes and sharded parameters."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from omegaconf import ListConfig, OmegaConf
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from automodel.config.schema import OptimizerConfig
from automodel.training.optimizer import build_optimizer


class TiedLanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.projection = nn.Linear(4, 4)
        self.norm = nn.RMSNorm(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.projection(self.embedding(ids))))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def names_of(model: nn.Module, group: dict) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for parameter in group["params"]]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_weight_decay_covers_matrices_only(name: str) -> None:
    model = TiedLanguageModel()
    matrices, vectors = build_optimizer(model, OptimizerConfig(name=name, weight_decay=0.3)).param_groups
    assert (names_of(model, matrices), matrices["weight_decay"]) == (["embedding.weight", "projection.weight"], 0.3)
    assert (names_of(model, vectors), vectors["weight_decay"]) == (["norm.weight", "projection.bias"], 0.0)


def test_order_is_by_name_whatever_the_order_of_registration() -> None:
    forward, backward = nn.Module(), nn.Module()
    for model, names in ((forward, "abc"), (backward, "cba")):
        for name in names:
            model.register_parameter(name, nn.Parameter(torch.ones(2, 2)))
    for model in (forward, backward):
        assert names_of(model, build_optimizer(model, OptimizerConfig()).param_groups[0]) == ["a", "b", "c"]


def test_empty_groups_are_left_out() -> None:
    assert len(build_optimizer(nn.Linear(3, 3, bias=False), OptimizerConfig()).param_groups) == 1


def test_a_tied_parameter_is_stepped_once() -> None:
    model = TiedLanguageModel()
    optimizer = build_optimizer(model, OptimizerConfig(name="sgd", lr=1.0, weight_decay=0.0))
    before = model.embedding.weight.detach().clone()
    model(torch.tensor([[1, 2]])).sum().backward()
    gradient = model.embedding.weight.grad
    optimizer.step()
    torch.testing.assert_close(model.embedding.weight.detach(), before - gradient, rtol=0, atol=0)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


def test_adamw_follows_the_published_update() -> None:
    config = OptimizerConfig(lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    layer = nn.Linear(2, 2, bias=False)
    weight, first, second = layer.weight.detach().double(), torch.zeros(2, 2).double(), torch.zeros(2, 2).double()
    optimizer = build_optimizer(layer, config)
    for step in range(1, 4):
        gradient = torch.randn(2, 2)
        layer.weight.grad = gradient.clone()
        optimizer.step()
        first = 0.8 * first + 0.2 * gradient
        second = 0.9 * second + 0.1 * gradient**2
        update = (first / (1 - 0.8**step)) / ((second / (1 - 0.9**step)).sqrt() + 1e-6)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * update
    torch.testing.assert_close(layer.weight.detach().double(), weight, rtol=1e-5, atol=1e-7)


def test_sgd_is_plain_by_default_and_takes_momentum() -> None:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    optimizer = build_optimizer(layer, OptimizerConfig(name="sgd", lr=1.0, weight_decay=0.0, momentum=0.5))
    for _ in range(2):
        layer.weight.grad = torch.ones(1, 1)
        optimizer.step()
    assert layer.weight.item() == -(1 + 1.5)


def test_half_precision_master_weights_are_refused_by_name() -> None:
    model = TiedLanguageModel()
    model.projection.to(torch.bfloat16)
    with pytest.raises(TypeError, match=r"projection\.bias is torch\.bfloat16.*fp32"):
        build_optimizer(model, OptimizerConfig())


def test_frozen_parameters_are_left_alone() -> None:
    model = TiedLanguageModel()
    model.projection.requires_grad_(False)
    optimizer = build_optimizer(model, OptimizerConfig())
    assert [names_of(model, group) for group in optimizer.param_groups] == [["embedding.weight"], ["norm.weight"]]
    with pytest.raises(ValueError, match="no parameter to train"):
        build_optimizer(model.requires_grad_(False), OptimizerConfig())


def test_state_holds_no_omegaconf_container_and_loads_safely(tmp_path) -> None:
    betas = OmegaConf.create([0.9, 0.95])
    assert isinstance(betas, ListConfig)
    layer = nn.Linear(2, 2)
    optimizer = build_optimizer(layer, OptimizerConfig(betas=betas))
    layer(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    loaded = torch.load(tmp_path / "optimizer.pt", weights_only=True)
    assert loaded["param_groups"][0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_sharded_and_plain_parameters_step_as_on_one_process(one_rank: None, name: str) -> None:
    reference = TiedLanguageModel()
    model = copy.deepcopy(reference)
    # Two meshes and plain tensors side by side, as expert parallelism and tensor parallelism leave them.
    line = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    square = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    model.embedding.weight = nn.Parameter(distribute_tensor(model.embedding.weight.detach(), line, [Shard(0)]))
    model.head.weight = model.embedding.weight
    model.projection.weight = nn.Parameter(
        distribute_tensor(model.projection.weight.detach(), square, [Shard(0), Shard(1)])
    )
    config = OptimizerConfig(name=name, lr=0.1, momentum=0.9)
    pairs = list(zip(reference.parameters(), model.parameters(), strict=True))
    optimizers = build_optimizer(reference, config), build_optimizer(model, config)
    for _ in range(3):
        for plain, other in pairs:
            plain.grad = torch.randn_like(plain)
            sharded = isinstance(other, DTensor)
            other.grad = distribute_tensor(plain.grad, other.device_mesh, other.placements) if sharded else plain.grad
        for optimizer in optimizers:
            optimizer.step()
    for plain, other in pairs:
        whole = other.full_tensor() if isinstance(other, DTensor) else other
        torch.testing.assert_close(whole, plain, rtol=0, atol=0)
