"""Generated code behind the kernels: Numba and LLVM."""
