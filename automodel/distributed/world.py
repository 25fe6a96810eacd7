"""The two small exchanges that all ranks make each step."""

from __future__ import annotations

import torch
import torch.distributed as dist

from automodel.distributed.mesh import MeshAxisName, MeshContext


class World:
    """All ranks of the run; with one process every exchange is the identity.

    Args:
        mesh_context: tells which ranks hold the same tokens.
    """

    def __init__(self, mesh_context: MeshContext) -> None:
        self.device = mesh_context.device
        self.size = mesh_context.world_size
        # The ranks that hold the same parameters or parts of them.
        self.ranks_of_a_stage = mesh_context.world_size // mesh_context.pp_size
        # Tensor- and pipeline-parallel ranks see the tokens of their peers: one of them speaks for all.
        self.speaks_for_loss = mesh_context.axis_rank(MeshAxisName.TP) == 0
        # Pipeline ranks without the last stage have no loss to tell, but all of them count tokens.
        self.speaks_for_tokens = self.speaks_for_loss and mesh_context.axis_rank(MeshAxisName.PP) == 0

    def sum_counts(self, *counts: int) -> list[int]:
        """Sum whole numbers over all ranks, on the CPU, so that no GPU work is waited for."""
        if self.size == 1:
            return list(counts)
        tensor = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def agree(self, text: str) -> bool:
        """Whether every rank passes the same text."""
        if self.size == 1:
            return True
        texts: list[str | None] = [None] * self.size
        dist.all_gather_object(texts, text)
        return all(other == text for other in texts)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """Every rank's values.

        Args:
            values: ``[n]``, fp64, on this rank's device.

        Returns:
            ``[world, n]`` on the CPU, the same bits on every rank.
        """
        if self.size == 1:
            return values.unsqueeze(0).cpu()
        gathered = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(gathered, values)
        return torch.stack(gathered).cpu()
