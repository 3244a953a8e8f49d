"""C++ kernels for CPUs, compiled when first used."""
