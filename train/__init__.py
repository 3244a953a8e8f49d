"""Training commands, `python -m train.imagenet` in a checkout, `aft-vision train` anywhere."""
