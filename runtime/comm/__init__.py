"""Collectives: how they run, on which groups and buffers, and what is said when one fails."""
