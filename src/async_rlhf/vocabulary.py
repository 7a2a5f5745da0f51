"""Whether two tokenizers turn any text into the same token ids, also when they are on two machines: a description of each is compared."""

import hashlib
import json
from typing import Any

from transformers import PreTrainedTokenizerBase


def describe_vocabulary(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """What decides which ids a text becomes, as JSON can hold it: `hash`, 16 hex digits of the tokenization model and the end of sequence;
    `added`, the tokens that are not in that model, by id; `pad`, `tokens`. None for a tokenizer that cannot say: one in plain Python."""
    if not tokenizer.is_fast:
        return None
    parts = json.loads(tokenizer.backend_tokenizer.to_str())
    decisive = [*(parts[key] for key in ("model", "normalizer", "pre_tokenizer")), tokenizer.eos_token_id]
    own, all_tokens = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False), tokenizer.get_vocab()
    return {
        "hash": hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16],
        "added": {str(i): token for token, i in all_tokens.items() if own.get(token) != i},
        "pad": tokenizer.pad_token_id,
        "tokens": len(all_tokens),
    }


def vocabulary_difference(a: dict[str, Any] | None, b: dict[str, Any] | None) -> str | None:
    """What two descriptions differ in; None if any text becomes the same ids. A pad token that only one of them has does not count."""
    if a is None or b is None:
        return "one of them is no fast tokenizer"
    if a["hash"] != b["hash"]:
        return "their tokenization models or ends of sequence differ"
    pads = {str(a["pad"]), str(b["pad"])}
    for i in sorted(a["added"].keys() | b["added"].keys(), key=int):
        one, other = a["added"].get(i), b["added"].get(i)
        if one != other and not (i in pads and None in (one, other)):
            return f"token {i} is {one!r} in the one, {other!r} in the other"
    return None


def same_vocabulary(a: PreTrainedTokenizerBase, b: PreTrainedTokenizerBase) -> bool:
    """Whether both turn any text into the same ids: equal tokenization models, and no id that means two things.

    A pad token that only one of them has does not count against it.
    """
    return vocabulary_difference(describe_vocabulary(a), describe_vocabulary(b)) is None
