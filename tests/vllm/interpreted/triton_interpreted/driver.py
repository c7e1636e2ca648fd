"""What Triton asks about the device."""

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class Driver(DriverBase):
    """One CPU, with one stream."""

    @classmethod
    def is_active(cls):
        """Returns whether this machine has the device."""
        return True

    def map_python_to_cpp_type(self, ty):
        """Fails: only compiled kernels need it."""
        raise NotImplementedError("nothing is compiled here: set TRITON_INTERPRET=1")

    def get_benchmarker(self):
        """Fails: a time in the interpreter says nothing."""
        raise NotImplementedError("nothing is measured here: leave kernels untuned")

    def get_current_target(self):
        """Returns the architecture that kernels would be compiled for."""
        return GPUTarget("cpu", "x86", 1)

    def get_active_torch_device(self):
        """Returns the device of the kernels' tensors."""
        return torch.device("cpu")

    def get_current_device(self):
        """Returns the number of the device."""
        return 0

    def get_current_stream(self, device=None):
        """Returns the number of the stream."""
        return 0
