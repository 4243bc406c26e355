"""A run's configuration: schema, checks, and how Hydra finds it. Imports neither torch nor vllm."""

from april_rl.config.schema import TrainConfig
from april_rl.config.store import config_dir, register, to_config

__all__ = ["TrainConfig", "config_dir", "register", "to_config"]
