"""Schedules: who runs which microbatch when, as pure functions of two integers."""
