"""The configuration of a run: schema, checks, and registration with Hydra. Imports neither torch
nor vLLM.
"""

from april_rl.config.schema import TrainConfig
from april_rl.config.store import config_dir, register, to_config

__all__ = ["TrainConfig", "config_dir", "register", "to_config"]
