"""The schedule: when collectives start and are waited for, and which travel together."""
