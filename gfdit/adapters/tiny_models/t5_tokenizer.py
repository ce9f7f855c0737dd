"""A T5 tokenizer whose words are single characters: printable ASCII, the space and T5's special tokens."""

from pathlib import Path

from transformers import T5Tokenizer

_SPECIAL = ("<pad>", "</s>", "<unk>")  # in the order of the ids that T5 configurations take for granted
_SPACE = "\u2581"  # what sentencepiece writes for a space
_PRINTABLE = range(33, 127)


def write_t5_tokenizer(directory: Path) -> int:
    """Write it; `tokenizer.json` is enough, there is no sentencepiece file. Returns the number of tokens."""
    # (token, log probability): the space is likelier than any one character, as in a real vocabulary.
    vocabulary = [(token, 0.0) for token in _SPECIAL]
    vocabulary.append((_SPACE, -2.0))
    vocabulary += [(chr(code), -3.0) for code in _PRINTABLE]
    T5Tokenizer(vocab=vocabulary, extra_ids=0, model_max_length=512).save_pretrained(directory)
    return len(vocabulary)
