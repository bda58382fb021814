"""The watch: ranks compare what they enter, and a failure names the collective and the ranks."""
