"""Scheduling policies, one per file."""
