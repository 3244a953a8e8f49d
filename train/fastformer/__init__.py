"""Training of the Fastformer text models on transformers' Trainer: one task a module, listed in `tasks`."""
