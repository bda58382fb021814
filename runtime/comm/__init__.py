"""Collectives: ops and functions that gather, reduce and quantise buckets; copies to the host."""
