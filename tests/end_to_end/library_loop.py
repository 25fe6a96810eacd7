"""A loop of one's own around the library, as in the README; run by torchrun."""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from automodel import (
    MeshAxisName,
    MixedPrecision,
    apply_model_infrastructure,
    instantiate_infrastructure,
    setup_distributed,
)

folder, section = sys.argv[1], {"strategy": sys.argv[2]}
dist.init_process_group("gloo")
mesh = setup_distributed(section, device_type="cpu")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
fp32 = MixedPrecision("float32", "float32", "float32")
model = apply_model_infrastructure(model, instantiate_infrastructure(mesh, fp32))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

tokens = torch.arange(4 * 17).reshape(4, 17) % 50
for _ in range(3):
    mine = tokens[mesh.axis_rank(MeshAxisName.DP) :: mesh.dp_size]
    logits = model(input_ids=mine[:, :-1], use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), mine[:, 1:].flatten(), reduction="sum")
    # Gradients are summed over ranks: divide by the tokens of the whole batch.
    (loss / (4 * 16)).backward()
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"loss {loss.item() / (4 * 16):.6f}", flush=True)
dist.barrier()
dist.destroy_process_group()
