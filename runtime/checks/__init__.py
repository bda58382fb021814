"""What is refused, and in which words: arguments, ops, models without values."""
