"""The report of a GPU, `python -m tools.gpu_report`: pieces that run by themselves, and what they found."""
