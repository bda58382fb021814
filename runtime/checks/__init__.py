"""Refusals and their words: arguments, ops, models without values."""
