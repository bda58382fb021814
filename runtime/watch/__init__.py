"""The watch: ranks compare their collectives, and a failure names the collective and the ranks."""
