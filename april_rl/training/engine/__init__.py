"""vLLM in the worker's process; the only importer of vllm.

vLLM reads environment variables when it is imported, so this module sets the ones that the
engines rely on before any module of this package imports it. The user's own values stay.
"""

import logging
import os
import warnings

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in the worker's process
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")  # no usage reports over the network
os.environ.setdefault(
    "TORCH_CPP_LOG_LEVEL", "ERROR"
)  # this has an effect only if torch is imported later
# On import vLLM looks at every name in torch.distributed, deprecated ones too.
warnings.filterwarnings("ignore", r"`torch\.distributed\.reduce_op` is deprecated", FutureWarning)
# vLLM sets up its logger only after the first messages.
logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])
# vLLM only warns when a layer gets no weights, so warnings of this module are shown.
if logging.getLogger("vllm").level > logging.WARNING:
    loading = logging.getLogger("vllm.model_executor.model_loader")
    loading.setLevel(logging.WARNING)
    loading.addHandler(logging.StreamHandler())
