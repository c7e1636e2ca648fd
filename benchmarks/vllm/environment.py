"""Sets environment variables that vLLM and torch read when they are imported; import this module first."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # benchmarks count steps in the scheduler
os.environ.setdefault("HISTOSPEC_DEADLINE", "0.2")  # seconds, because server and vLLM share a few cores
