"""Rewrites: passes that change what a graph computes or sends, one a file."""
