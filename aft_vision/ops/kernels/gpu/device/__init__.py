"""What Triton compiles. A parameter in capitals is a pointer or a constant; `None` for a tensor leaves its part out."""
