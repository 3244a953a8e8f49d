"""Compiled forms of the operators, imported when first used."""
