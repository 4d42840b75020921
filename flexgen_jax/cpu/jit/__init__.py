"""The generated code behind the CPU's compute kernels: Numba and LLVM."""
