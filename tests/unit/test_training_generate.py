"""Sampling: reproducible, only what the tokenizer can decode, one choice for all ranks."""

import pytest
import torch
from torch import Tensor

from automodel.data.tokenizer import byte_tokenizer
from automodel.training.generate import generate_text

TOKENIZER = byte_tokenizer()
PADDED_VOCABULARY = 264


def uniform(ids: Tensor) -> Tensor:
    return torch.zeros(1, ids.shape[1], PADDED_VOCABULARY)


def letters(ids: Tensor) -> Tensor:
    """Logits that allow a to z alone."""
    logits = torch.full((1, ids.shape[1], PADDED_VOCABULARY), -torch.inf)
    logits[..., ord("a") : ord("z") + 1] = 0.0
    return logits


def always(token: int):
    def forward(ids: Tensor) -> Tensor:
        logits = torch.zeros(1, ids.shape[1], PADDED_VOCABULARY)
        logits[..., token] = 50.0
        return logits

    return forward


def generate(forward, prompt="ab", num_tokens=12, context_length=64, seed=0, **options) -> str:
    return generate_text(forward, TOKENIZER, prompt, num_tokens, context_length, seed, "cpu", **options)


def test_the_text_is_the_prompt_and_its_continuation() -> None:
    text = generate(letters, prompt="def ", num_tokens=12)
    assert text.startswith("def ")
    assert len(text) == 4 + 12
    assert text[4:].isalpha()


def test_the_seed_decides() -> None:
    assert generate(letters, seed=1) == generate(letters, seed=1)
    assert generate(letters, seed=1) != generate(letters, seed=2)


def test_global_random_state_is_neither_used_nor_touched() -> None:
    torch.manual_seed(5)
    first = generate(letters)
    state = torch.get_rng_state()
    torch.manual_seed(6)
    assert generate(letters) == first
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("forbidden", [TOKENIZER.pad_token_id, TOKENIZER.bos_token_id, len(TOKENIZER), 263])
def test_padding_and_undecodable_ids_are_never_sampled(forbidden: int) -> None:
    seen: list[int] = []

    def watch(token: Tensor) -> Tensor:
        seen.append(int(token))
        return token

    # Near-certain in the logits, and yet never drawn.
    generate(always(forbidden), num_tokens=50, agree=watch)
    assert seen
    assert forbidden not in seen
    assert max(seen) < len(TOKENIZER)


def test_end_of_text_stops() -> None:
    calls = []

    def forward(ids: Tensor) -> Tensor:
        calls.append(ids.shape[1])
        return always(TOKENIZER.eos_token_id if len(calls) == 3 else ord("x"))(ids)

    assert generate(forward, num_tokens=100) == "abxx"
    assert calls == [2, 3, 4]


def test_the_model_sees_the_last_tokens_only() -> None:
    windows = []

    def forward(ids: Tensor) -> Tensor:
        windows.append(bytes(ids[0].tolist()).decode())
        return always(ord("x"))(ids)

    generate(forward, prompt="abcdef", num_tokens=3, context_length=4)
    assert windows == ["cdef", "defx", "efxx"]


def test_ranks_with_different_rounding_write_one_text() -> None:
    """Rank 0's choices, handed to a rank whose logits would choose otherwise."""
    chosen: list[Tensor] = []

    def send(token: Tensor) -> Tensor:
        chosen.append(token.clone())
        return token

    text = generate(letters, agree=send)
    received = iter(chosen)
    calls = []

    def rounded_otherwise(ids: Tensor) -> Tensor:
        calls.append(ids.shape[1])
        return letters(ids) - torch.arange(PADDED_VOCABULARY) * 0.3

    assert generate(rounded_otherwise) != text
    calls.clear()
    assert generate(rounded_otherwise, agree=lambda _: next(received)) == text
    assert len(calls) == len(chosen)


def test_temperature_zero_takes_the_most_likely_token() -> None:
    assert generate(always(ord("q")), num_tokens=3, temperature=0.0) == "abqqq"
    with pytest.raises(ValueError, match="temperature"):
        generate(uniform, temperature=-1.0)


def test_temperature_sharpens() -> None:
    def slope(ids: Tensor) -> Tensor:
        logits = letters(ids)
        logits[..., ord("e")] = 2.0
        return logits

    cold, hot = (generate(slope, num_tokens=200, temperature=t).count("e") for t in (0.3, 3.0))
    assert cold > 150 > 60 > hot


def test_an_empty_prompt_begins_with_the_first_token() -> None:
    windows = []

    def forward(ids: Tensor) -> Tensor:
        windows.append(ids.tolist())
        return always(ord("x"))(ids)

    assert generate(forward, prompt="", num_tokens=2) == "xx"
    assert windows[0] == [[TOKENIZER.bos_token_id]]


def test_no_gradient_is_recorded() -> None:
    weight = torch.zeros(PADDED_VOCABULARY, requires_grad=True)

    def forward(ids: Tensor) -> Tensor:
        logits = weight.expand(1, ids.shape[1], -1)
        assert not (logits + 1).requires_grad
        return logits

    generate(forward, num_tokens=1)
