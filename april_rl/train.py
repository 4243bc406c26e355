"""Command line: `python -m april_rl.train +recipe=tiny_cpu key=value ...`; Hydra composes, the
trainer runs.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from april_rl.config import TrainConfig, config_dir, register, to_config
from april_rl.errors import RunError
from april_rl.interrupts import EXIT_STATUS, Interrupts

register()


@hydra.main(version_base="1.3", config_path=config_dir(), config_name="train")
def main(composed: DictConfig) -> None:
    """Check the configuration and run it; a mistake in it ends in one message and status 1."""
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    try:
        config = to_config(composed)
        run(config, run_dir, OmegaConf.to_container(composed, resolve=True, enum_to_str=True))
    except RunError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        with suppress(OSError):
            run_dir.rmdir()  # unless there is something in it
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        sys.exit(EXIT_STATUS)


def run(config: TrainConfig, run_dir: Path, plain: object) -> None:
    """Train. What is heavy is imported here, so that --help and --cfg job answer at once."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    interrupts = Interrupts()
    from april_rl.tiny.prepare import resolve
    from april_rl.trainer import Trainer

    model = Path(resolve(config.model.path, key="model.path"))
    if model.is_dir():  # otherwise a name of the hub
        config.model.path = str(model.absolute())  # the workers of a cluster are elsewhere
    config.data.path = resolve(config.data.path, key="data.path")
    for name, source in config.data.sources.items():
        source.path = resolve(source.path, key=f"data.sources.{name}.path")
    for name, held_out in config.evaluation.sets.items():
        held_out.path = resolve(held_out.path, key=f"evaluation.sets.{name}.path")
    assert isinstance(plain, dict)
    with Trainer(config, run_dir=run_dir, plain_config=plain, interrupts=interrupts) as trainer:
        trainer.run()


if __name__ == "__main__":
    main()
