"""Parts that several operations share: mixing, numerics, repair, building and calling C++, launching Triton."""
