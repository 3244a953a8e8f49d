"""The causal forms of AFT-full, AFT-local and AFT-simple."""
