"""Sharding inside of other libraries' loops: one module a library, which must be installed."""
