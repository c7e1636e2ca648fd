"""Sets what vLLM and torch read when they are imported: import this first."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # steps are counted in the scheduler
os.environ.setdefault("HISTOSPEC_DEADLINE", "0.2")  # seconds: a few cores do everything
