"""A backend of Triton that claims the CPU as its device. Kernels run in Triton's interpreter: TRITON_INTERPRET=1."""
