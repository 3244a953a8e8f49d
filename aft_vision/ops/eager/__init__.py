"""The operators in torch alone: forward and an explicit backward, on any device, without autograd inside."""
