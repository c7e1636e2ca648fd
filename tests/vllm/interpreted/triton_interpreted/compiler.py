"""What Triton asks before it compiles a kernel; here it never does."""

from triton.backends.compiler import BaseBackend


class Backend(BaseBackend):
    """Compiles nothing."""

    @staticmethod
    def supports_target(target):
        """Returns whether the backend is for a device."""
        return target.backend == "cpu"

    def hash(self):
        """Returns the version of the compiler."""
        return "interpreted"

    def parse_options(self, options):
        """Fails: only compiled kernels have options."""
        raise NotImplementedError("nothing is compiled here: set TRITON_INTERPRET=1")

    def add_stages(self, stages, options, language):
        """Does nothing: there are no stages."""

    def load_dialects(self, context):
        """Does nothing: there are no dialects."""

    def get_module_map(self):
        """Returns no module: the device has no library of its own."""
        return {}
