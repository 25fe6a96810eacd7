"""Which models can return their loss, and what is said to those that cannot."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from automodel.config.errors import ConfigError
from automodel.model.linear_cross_entropy import LogitTransform
from automodel.model.output_head import LossHead, check_output_head

TINY = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def build(model_type: str, device: str = "meta", **fields: Any) -> PreTrainedModel:
    config = CONFIG_MAPPING[model_type](**{**TINY, **fields})
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("model_type", "fields", "transform"),
    [
        ("llama", {}, LogitTransform()),
        ("gemma2", {"final_logit_softcapping": 7.0}, LogitTransform(soft_cap=7.0)),
        ("gemma2", {"final_logit_softcapping": None}, LogitTransform()),
        ("cohere", {"logit_scale": 0.25}, LogitTransform(scale=0.25)),
        ("granite", {"logits_scaling": 8.0}, LogitTransform(scale=0.125)),
        ("phi", {}, LogitTransform()),
        ("gpt2", {}, LogitTransform()),
    ],
)
def test_reads_the_models_own_transform(model_type: str, fields: dict[str, Any], transform: LogitTransform) -> None:
    _, found = check_output_head(build(model_type, **fields))
    assert found == transform


def test_examined_model_is_left_as_it_was() -> None:
    model = build("llama")
    before = {name: set(module.__dict__) for name, module in model.named_modules()}
    check_output_head(model)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == before


def refusal(model: PreTrainedModel) -> str:
    with pytest.raises(ConfigError) as caught:
        check_output_head(model)
    assert type(model).__name__ in str(caught.value)
    return str(caught.value)


def test_refuses_a_cap_that_the_configuration_does_not_name() -> None:
    model = build("gemma2", final_logit_softcapping=7.0)
    own_forward = model.forward

    def halved(**inputs: Any) -> Any:
        output = own_forward(**inputs)
        output.logits = output.logits / 2
        return output

    model.forward = halved
    assert "its configuration does not name" in refusal(model)


def test_refuses_a_head_that_is_not_linear() -> None:
    model = build("llama")
    model.lm_head = nn.Sequential(nn.Linear(32, 67))
    assert "not a linear layer" in refusal(model)


def test_refuses_a_head_that_is_called_twice() -> None:
    model = build("llama")
    own_forward = model.forward
    model.forward = lambda **inputs: (own_forward(**inputs), own_forward(**inputs))[1]
    assert "once for all tokens" in refusal(model)


def test_refuses_a_forward_that_fails() -> None:
    model = build("llama")

    def fails(**_: Any) -> Tensor:
        raise ValueError("it wants an image")

    model.forward = fails
    assert "it wants an image" in refusal(model)


def test_model_returns_its_loss_with_labels_and_logits_without() -> None:
    model = build("gemma2", device="cpu", final_logit_softcapping=1.0)
    ids = torch.randint(67, (2, 5), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(-1, 1)
    labels[:, -1] = -100
    logits = model(input_ids=ids, use_cache=False).logits
    names = list(model.state_dict())
    LossHead(model).install()
    output = model(input_ids=ids, shifted_labels=labels, use_cache=False)
    assert output.logits is None
    expected = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    torch.testing.assert_close(output.loss, expected, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, logits)
    assert list(model.state_dict()) == names
