"""Sharding inside of other libraries' loops: a module for each library, which it needs."""
