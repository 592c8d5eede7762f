"""A tiny random Qwen3-shaped model with a tokenizer, made offline: what the quickstart trains.

``python -m slime_hpc.testing.tiny_model DIRECTORY``
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slime_hpc.errors import UserError
from slime_hpc.records import read_json, write_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

VOCAB_SIZE = 512
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
WEIGHT_STD = 0.08
"""Large enough that the model's choices differ from position to position, small enough to start near uniform."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = """
The quick brown fox jumps over the lazy dog while seven wizards mix black quartz potions under bright moonlight.
A user asks a question and the assistant answers it; a system keeps both of them honest about what they know.
One plus two equals three, four times five makes twenty, and nobody remembers how many prime numbers there were.
Every policy receives a reward, every reward shapes the next gradient, and every gradient moves some weights.
In the garden an old baker counts letters from his neighbour, opens the blue door, and waits by the river for rain.
Write a short poem about the train, the teacher, the small boat, or the quiet robot that looks at the evening sky.
"""


def make_tiny_qwen3(directory: Path, seed: int = 0) -> bool:
    """Make the model in ``directory``; True if made, False if it was there already.

    2 layers, hidden 64, vocabulary 512, float32, about 150 k weights; the same bytes for the same seed.
    UserError where the directory holds anything else. A kill leaves the model whole or absent.
    """
    marker = {"tiny_qwen3_seed": seed}
    if directory.exists() and any(directory.iterdir()):
        if _read_marker(directory) == marker:
            return False
        raise UserError(f"{directory} is not empty and not a tiny model of seed {seed}; name a new directory")
    directory.parent.mkdir(parents=True, exist_ok=True)
    scratch = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    try:
        _tokenizer().save_pretrained(scratch)
        _model(seed).save_pretrained(scratch)
        write_json(_marker(scratch), marker)
        os.replace(scratch, directory)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return True


def _marker(directory: Path) -> Path:
    return directory / ".tiny-model.json"


def _read_marker(directory: Path) -> object:
    return read_json(_marker(directory)) if _marker(directory).exists() else None


def _tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE, "the corpus has too few words to fill the vocabulary"
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def _model(seed: int) -> Qwen3ForCausalLM:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=SPECIAL_TOKENS.index("<|im_end|>"),
        pad_token_id=SPECIAL_TOKENS.index("<|pad|>"),
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, WEIGHT_STD, generator=generator)
    return model


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m slime_hpc.testing.tiny_model", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        made = make_tiny_qwen3(args.directory, args.seed)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    verb = "made" if made else "found"
    print(f"{verb} a tiny random Qwen3 model (2 layers, hidden 64, vocabulary {VOCAB_SIZE}) in {args.directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
