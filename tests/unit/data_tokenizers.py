"""A tokenizer that is not the byte tokenizer, for the tests of the data package."""

from pathlib import Path


def save_word_tokenizer(folder: Path, eos_token: str | None = "[EOS]") -> Path:
    """Save a tokenizer of the words the (1), cat (2), sat (3), with [UNK] (0) and its eos (4); returns the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: number for number, word in enumerate(["[UNK]", "the", "cat", "sat"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]", eos_token=eos_token).save_pretrained(folder)
    return folder
