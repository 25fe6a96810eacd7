"""Text from a trained model, token by token, under any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


@torch.no_grad()
def generate_text(
    forward: Callable[[Tensor], Tensor],
    tokenizer: Any,
    prompt: str,
    num_tokens: int,
    context_length: int,
    seed: int,
    device: torch.device | str,
    temperature: float = 0.8,
    agree: Callable[[Tensor], Tensor] | None = None,
) -> str:
    """Continue ``prompt``; returns the prompt and up to ``num_tokens`` sampled tokens, as text.

    Every rank of a sharded model must call this with the same arguments: all make the same number of
    forward calls. Their logits are equal only up to rounding, so ranks may draw different tokens;
    ``agree`` makes one choice hold for all.

    Only what the tokenizer can decode is sampled: not the entries that pad a vocabulary to a round size,
    nor the padding and beginning-of-text tokens. The end-of-text token ends the text.

    Args:
        forward: input ids [1, seq] on ``device`` to logits [1, seq, vocabulary], in evaluation mode.
        tokenizer: a Hugging Face tokenizer.
        prompt: where the text begins; empty: the tokenizer's beginning- or end-of-text token.
        num_tokens: how many tokens are sampled at most.
        context_length: how many of the last tokens the model sees.
        seed: of the sampling.
        device: where ``forward`` wants its ids.
        temperature: logits are divided by it; 0 takes the most likely token.
        agree: maps a token id [1] on ``device`` to that of the rank whose choice holds, e.g. by a broadcast.

    Raises:
        ValueError: a negative temperature, or an empty prompt with a tokenizer that has no token to begin with.
    """
    if temperature < 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"]) or [_first_token(tokenizer)]
    forbidden = {tokenizer.pad_token_id, tokenizer.bos_token_id} - {None, tokenizer.eos_token_id}
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_tokens):
        window = torch.tensor([ids[-context_length:]], device=device)
        # Sampled on the CPU: the generator's numbers are then the same on every kind of device.
        logits = forward(window)[0, -1].float().cpu()
        logits[len(tokenizer) :] = -torch.inf
        logits[list(forbidden)] = -torch.inf
        token = _sample(logits, temperature, generator)
        if agree is not None:
            token = agree(token.to(device))
        ids.append(int(token))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids, skip_special_tokens=True)


def _sample(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    """A token id [1] from logits [vocabulary]."""
    if temperature == 0:
        return logits.argmax().reshape(1)
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)


def _first_token(tokenizer: Any) -> int:
    for token in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if token is not None:
            return token
    raise ValueError("an empty prompt needs a tokenizer with a beginning- or end-of-text token")
