"""vLLM in the worker's process; the only importer of vllm.

vLLM reads its environment while it is imported, so what the engines rely on is set here, before any
module of this package can import it. What the user has set already stays.
"""

import logging
import os
import warnings

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in the worker's process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no reports to the outside
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # works where torch is imported later
# vLLM looks at every name of torch.distributed while it is imported, old ones too.
warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated", FutureWarning)
# vLLM sets up its logger only after the first messages.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
